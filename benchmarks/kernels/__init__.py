"""Single kernels and whole steps on one thread, beside PyTorch and NumPy: `python -m benchmarks.kernels`."""
