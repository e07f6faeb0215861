"""Checkpoints that any layout can load: what is in one, how it gets onto disk, when it is written and read."""
