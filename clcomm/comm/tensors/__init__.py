"""PyTorch's tensors as a Communicator's arrays, and their collectives."""
