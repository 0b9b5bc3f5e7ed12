"""Drawings: scenes of marks, rendered by svg.py, within a page and as a file."""
