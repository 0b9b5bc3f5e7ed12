"""LizarDist's package for models, which are PyTorch's."""
