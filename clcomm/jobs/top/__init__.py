"""`clcomm top`: the current state of a running job's ranks, from their status pages."""
