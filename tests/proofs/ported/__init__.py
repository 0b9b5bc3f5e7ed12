"""Scripts by others, run with PyTorch and with the engine: losses compared. See `__main__.py`."""
