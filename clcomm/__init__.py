"""Data-parallel training for OpenCL devices over MPI."""

__version__ = "0.1.0"
