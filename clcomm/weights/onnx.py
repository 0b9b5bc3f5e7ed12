"""A native model as an ONNX graph, from the tape of a forward pass in eval mode.

The number of samples stays open. Computations outside the tape, for example in NumPy, are lost.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from clcomm.engine.nn import Module
from clcomm.errors import ArgumentError, needed
from clcomm.storage.files import FilePath, replacing, saving
from clcomm.weights.onnx_graph import Graph
from clcomm.weights.onnx_nodes import WRITERS


def export_onnx(model: Module, path: FilePath, in_shape: Iterable[int], *, in_dtype: str = "float32") -> None:
    """Write a model as an ONNX file with the input "x", [N, *in_shape], and the output "y".

    Args:
        model: any module of the engine with one input tensor.
        in_shape: the shape of one sample.
        in_dtype: "float32", or "int32" for a model whose input is indices, as of an Embedding.

    Raises:
        ArgumentError: onnx is not installed, or the model does not fit the samples or has no ONNX form.
        CheckpointWriteError: the file could not be written; an old one is kept.
    """
    with needed("onnx"):
        import onnx
    if in_dtype not in ("float32", "int32"):
        raise ArgumentError(f"in_dtype: expected 'float32' or 'int32', got {in_dtype!r}")
    graph = Graph(onnx, model, tuple(in_shape), np.dtype(in_dtype), WRITERS)
    data = graph.finish().SerializeToString()
    with saving("model", path), replacing(path) as file:
        file.write(data)
