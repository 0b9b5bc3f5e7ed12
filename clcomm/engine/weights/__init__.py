"""Weights in other projects' forms: safetensors in and out; `clcomm.jobs.checkpoint` is for resuming."""

from clcomm.engine.weights.safetensors import load, load_into, save

__all__ = ["load", "load_into", "save"]
