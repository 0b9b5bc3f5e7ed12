"""The flat space: the places of parameters, and the buckets and shards into which the space is cut."""
