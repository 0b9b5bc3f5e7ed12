"""Attention as ONNX nodes: products of matrices with a softmax between them."""

from __future__ import annotations

import numpy as np

from clcomm.engine.autograd import Context
from clcomm.engine.ops.attention import Problem
from clcomm.engine.tensor import Tensor
from clcomm.weights.onnx_graph import Graph, refuse


def attention(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    """Attention of separate queries, keys and values, with heads apart or packed in each row."""
    problem: Problem = context.problem
    _require_apart(graph, *context.inputs)
    if problem.places[0].row == problem.sizes.head:  # heads, if any, are a dimension before the rows
        return _attended(graph, inputs, context.inputs[0].ndim, context)
    lengths = problem.sizes.head, problem.sizes.head, problem.sizes.value
    apart = [
        _heads_apart(graph, name, each.shape[-2], problem.sizes.heads, length)
        for name, each, length in zip(inputs, context.inputs, lengths, strict=True)
    ]
    return _heads_beside(graph, _attended(graph, apart, 4, context), tensor)


def packed_attention(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    """Attention of queries, keys and values packed in each row."""
    sizes, width = context.problem.sizes, tensor.shape[-1]
    _require_apart(graph, tensor)
    axis = graph.whole_numbers([-1])
    apart = []
    for start in (0, width, 2 * width):
        ends = graph.whole_numbers([start]), graph.whole_numbers([start + width])
        part = graph.node("Slice", [*inputs, *ends, axis])
        apart.append(_heads_apart(graph, part, tensor.shape[-2], sizes.heads, sizes.head))
    return _heads_beside(graph, _attended(graph, apart, 4, context), tensor)


def _require_apart(graph: Graph, *tensors: Tensor) -> None:
    if any(any(graph.samples(each)[-2:]) for each in tensors):
        refuse("samples to stay apart, got attention between them")


def _heads_apart(graph: Graph, name: str, rows: int, heads: int, length: int) -> str:
    """Return [..., rows, heads * length] as [batches, heads, rows, length]."""
    split = graph.node("Reshape", [name, graph.whole_numbers([-1, rows, heads, length])])
    return graph.node("Transpose", [split], perm=[0, 2, 1, 3])


def _heads_beside(graph: Graph, name: str, tensor: Tensor) -> str:
    """Return [batches, heads, rows, length] in the shape of a tensor [..., rows, heads * length]."""
    together = graph.node("Transpose", [name], perm=[0, 2, 1, 3])
    return graph.node("Reshape", [together, graph.sizes(tensor)])


def _attended(graph: Graph, inputs: list[str], ndim: int, context: Context) -> str:
    """Return softmax(scale q k^T + mask) v of tensors with `ndim` dimensions; a query that sees no key gives zeros."""
    q, k, v = inputs
    turned = graph.node("Transpose", [k], perm=[*range(ndim - 2), ndim - 1, ndim - 2])
    scores = graph.node("Mul", [graph.node("MatMul", [q, turned]), graph.number(context.problem.scale)])
    mask = _mask(graph, ndim, context)
    if mask is None:
        return graph.node("MatMul", [graph.node("Softmax", [scores], axis=-1), v])
    blind = np.asarray(np.isneginf(mask).all(axis=-1))
    added = mask.astype(np.float32)
    added[blind] = 0.0
    scores = graph.node("Add", [scores, graph.values(added)])
    weights = graph.node("Softmax", [scores], axis=-1)
    if blind.any():
        weights = graph.node("Mul", [weights, graph.values(1.0 - blind[..., None].astype(np.float32))])
    return graph.node("MatMul", [weights, v])


def _mask(graph: Graph, ndim: int, context: Context) -> np.ndarray | None:
    """Return the mask to add to scores of `ndim` dimensions; None: none."""
    problem: Problem = context.problem
    if problem.causal:
        later = np.arange(problem.sizes.keys) > np.arange(problem.sizes.queries)[:, None]
        return np.where(later, -np.inf, 0.0)
    if problem.mask is None:
        return None
    mask = graph.fixed(context, lambda node: node.problem.mask).numpy()
    if ndim > 4 and mask.shape[0] > 1:
        refuse(f"at most 4 dimensions with a mask that differs between the first, got {ndim}")
    return mask.reshape(mask.shape[-min(ndim, 4) :])  # with fewer dimensions the first ones are 1
