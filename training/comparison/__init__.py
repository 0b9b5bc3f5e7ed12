"""The same training with several ways to synchronise, side by side."""
