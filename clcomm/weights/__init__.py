"""Weights in other projects' forms: safetensors in and out; `clcomm.checkpoint` is for resuming."""

from clcomm.weights.safetensors import load, load_into, save

__all__ = ["load", "load_into", "save"]
