"""Measurements, each side by side with what it is compared with: `python -m benchmarks.peers` and its neighbours."""
