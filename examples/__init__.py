"""Programs to run: `python -m examples.loop`, `examples.mnist` and `examples.compare_bucketing`."""
