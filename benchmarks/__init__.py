"""Benchmarks, each measured beside its reference: `python -m benchmarks.peers` and others."""
