"""`clcomm top`: what the ranks of a running job do, read from the boards that they keep for each other."""
