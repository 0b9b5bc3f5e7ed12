"""A cost model of communication, and forecasts from it."""
