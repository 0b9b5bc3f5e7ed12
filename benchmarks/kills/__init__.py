"""A kill every 15 s, and ranks that come back: clcomm beside torchft, `python -m benchmarks.kills`."""
