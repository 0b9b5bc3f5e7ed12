"""Differentiable operations, one file per topic, forward and backward side by side."""
