"""This project beside its peers on the same model, data, batch and ranks: `python -m benchmarks.peers`."""
