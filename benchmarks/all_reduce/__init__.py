"""All-reduce of a flat gradient buffer, beside MPI's own and gloo's: `python -m benchmarks.all_reduce`."""
