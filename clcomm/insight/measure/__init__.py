"""Measurements of collectives: `clcomm bench`, `clcomm tune`, and how sure a figure is."""
