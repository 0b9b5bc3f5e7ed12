"""PyTorch's tensors as the arrays that a Communicator moves, and their collectives."""
