"""The engines that run a model on one rank: native, PyTorch or netcl."""
