"""Programs to run: `python -m examples.mnist`, `python -m examples.compare_bucketing`."""
