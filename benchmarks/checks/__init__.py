"""The cost of comparing the calls of all ranks."""
