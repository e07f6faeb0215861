"""Hydra plugin: sweeps over a union of grids."""
