"""Each function and layer of the engine beside PyTorch's, by the same code under both libraries' names."""
