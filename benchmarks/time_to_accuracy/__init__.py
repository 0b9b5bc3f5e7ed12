"""From the shell prompt to a test accuracy, beside PyTorch DDP."""
