"""Weights in other projects' forms: safetensors in and out, and ONNX out; `clcomm.checkpoint` is for resuming."""

from clcomm.weights.onnx import export_onnx
from clcomm.weights.safetensors import load, load_into, save

__all__ = ["export_onnx", "load", "load_into", "save"]
