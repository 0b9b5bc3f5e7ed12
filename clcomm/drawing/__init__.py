"""Drawings: scenes of marks, rendered alike by svg.py and png.py."""
