"""The layers of clcomm's models, from the tape of a forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context
from clcomm.engine.nn.module import evaluating
from clcomm.engine.ops.attention import Attention, PackedAttention
from clcomm.engine.ops.batched_matmul import BatchedMatMul
from clcomm.engine.ops.conv2d import Conv2dOp, ConvReluPoolOp, ConvTranspose2dOp
from clcomm.engine.ops.matmul import LinearOp, MatMul
from clcomm.engine.tensor import Tensor
from clcomm.insight.summary.model_summary import Layer


def layers_of(model: Any, input_shape: tuple[int, ...]) -> Iterator[Layer]:
    """Yield a layer for each operation, in the order of the forward pass.

    Raises ArgumentError if the model cannot take the input, or its result does not depend on it.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    device = next(iter(model.parameters())).device
    dtype = np.dtype(getattr(model, "input_dtype", np.float32))
    # requires_grad puts frozen layers on the tape too.
    x = Tensor(np.zeros(input_shape, dtype), device, requires_grad=dtype.kind == "f")
    with evaluating(model):  # leaves running statistics as they are
        result = model(x)
    if not isinstance(result, Tensor) or result._node is None:
        raise ArgumentError("model: expected one whose result is a tensor that depends on its input")
    samples, trained, listed = input_shape[0], set[int](), set[str]()
    for node, shape in _walk(result):
        inputs = node.inputs
        gets_gradient = [
            isinstance(i, Tensor) and (_is_trained(i, names) or id(producer) in trained)
            for i, producer in zip(inputs, node.producers, strict=True)
        ]
        if any(gets_gradient):
            trained.add(id(node))
        own = [names[id(i)] for i in inputs if id(i) in names and names[id(i)] not in listed]
        listed.update(own)
        flops = _flops(node, shape) // samples
        # Backward has a product as large as the forward one for each factor that gets a gradient; a bias has none.
        passes = 1 + sum(gets_gradient[:2])
        sample_shape = shape[1:] if shape[:1] == (samples,) else shape
        yield Layer(_common_prefix(own), _kind(node), sample_shape, tuple(own), flops, flops * passes)
    unused = tuple(name for name in names.values() if name not in listed)
    if unused:
        yield Layer("", "not used", None, unused, 0, 0)


def _is_trained(x: Tensor, names: dict[int, str]) -> bool:
    return id(x) in names and x.requires_grad


def _walk(result: Tensor) -> list[tuple[Context, tuple[int, ...]]]:
    """Return the tape's nodes in order, each with the shape of its result."""
    shapes: dict[Any, tuple[int, ...]] = {result._node: result.shape}
    waiting: list[Any] = [result._node]
    while waiting:
        node = waiting.pop()
        for x, producer in zip(node.inputs, node.producers, strict=True):
            if x is not None and producer is not None and producer not in shapes:
                shapes[producer] = x.shape
                waiting.append(producer)
    return sorted(shapes.items(), key=lambda item: item[0].order)


def _flops(node: Context, shape: tuple[int, ...]) -> int:
    """Return the arithmetic of a node's forward pass over a whole batch, with a result of `shape`."""
    factors: tuple[int, ...] = (0,)
    if node.op in (Conv2dOp, ConvReluPoolOp, ConvTranspose2dOp):
        g = node.geometry
        factors = g.images, g.groups, g.outputs, g.out_height, g.out_width, g.channels, g.taps
    elif node.op in (LinearOp, MatMul):
        a, b = node.inputs[0].shape, node.inputs[1].shape
        factors = a[0], b[0], b[1]  # b is K x N or N x K
    elif node.op is BatchedMatMul:
        factors = *shape, node.inputs[0].shape[-2 if node.turned[0] else -1]
    elif node.op in (Attention, PackedAttention):
        sizes = node.problem.sizes
        factors = sizes.batches, sizes.heads, sizes.queries, sizes.keys, sizes.head + sizes.value
    return 2 * math.prod(factors)


def _kind(node: Context) -> str:
    if node.op is ConvReluPoolOp:
        return "Conv2d+ReLU+Pool"
    if node.op is LinearOp and node.saved[2] is not None:
        return "Linear+ReLU"
    return node.op.__name__.removesuffix("Op")


def _common_prefix(names: list[str]) -> str:
    """Return the name of the module that holds all of these parameters; "": none."""
    owners = {name.rpartition(".")[0] for name in names}
    return owners.pop() if len(owners) == 1 else ""
