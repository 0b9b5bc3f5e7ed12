"""Drawn programs as for PyTorch: the engine has PyTorch's values, or refuses; never other values. See `__main__.py`."""
