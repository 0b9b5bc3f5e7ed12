"""The sharded update beside the plain one: `python -m benchmarks.sharded_update`."""
