"""Drawings: a scene of marks, which svg.py and png.py write alike."""
