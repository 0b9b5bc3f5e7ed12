"""What LizarDist has for models: PyTorch's."""
