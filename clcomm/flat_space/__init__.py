"""The flat space: where parameters lie, and the buckets and shards it is cut into."""
