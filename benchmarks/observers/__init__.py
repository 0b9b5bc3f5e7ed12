"""What watching costs: stats, which are always on, and a trace."""
