"""Two-dimensional sparse parallelism and communication compression for DLRM training."""

__version__ = "0.1.0"
