"""The cost of observers: stats, which are always on, and a trace."""
