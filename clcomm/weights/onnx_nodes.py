"""Operations of the engine in eval mode as ONNX nodes (https://onnx.ai/onnx/operators)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.activation import Gelu, GeluTanh, LeakyRelu, Relu, SigmoidOp, Silu, TanhOp
from clcomm.engine.ops.attention import Attention, PackedAttention
from clcomm.engine.ops.batch_norm import GIVEN, BatchNormOp
from clcomm.engine.ops.batched_matmul import BatchedMatMul
from clcomm.engine.ops.blocks import Concat, Pad, SliceOp
from clcomm.engine.ops.conv2d import Conv2dOp, ConvReluPoolOp, ConvTranspose2dOp
from clcomm.engine.ops.elementwise import Add, Affine, Div, DivideNumber, Mul, Sub
from clcomm.engine.ops.indexing import EmbeddingOp
from clcomm.engine.ops.layer_norm import LayerNormOp
from clcomm.engine.ops.matmul import LinearOp, MatMul
from clcomm.engine.ops.pool import AdaptiveAvgPool2dOp, AvgPool2dOp, MaxPool2dOp
from clcomm.engine.ops.reduce import SumOp
from clcomm.engine.ops.shape import Reshape, Transpose
from clcomm.engine.ops.softmax import LogSoftmaxOp, LogSumExp, SoftmaxOp
from clcomm.engine.tensor import Tensor
from clcomm.weights.onnx_attention import attention, packed_attention
from clcomm.weights.onnx_graph import Graph, Writer, refuse

#: The end of a slice towards element 0, which is in it.
_BEFORE_ALL = -(1 << 62)


def _linear(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    product = graph.node("Gemm", inputs, transB=1)
    return graph.node("Relu", [product]) if context.mask is not None else product


def _batched_product(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    factors = []
    for name, factor, is_turned in zip(inputs, context.inputs, context.turned, strict=True):
        order = [*range(factor.ndim - 2), factor.ndim - 1, factor.ndim - 2]
        factors.append(graph.node("Transpose", [name], perm=order) if is_turned else name)
    return graph.node("MatMul", factors)


def _convolution(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    g = context.geometry
    return graph.node(
        "Conv", inputs, kernel_shape=[g.kernel_h, g.kernel_w], strides=[g.stride, g.stride],
        pads=[g.pad_h, g.pad_w, g.pad_h, g.pad_w], dilations=[g.apart_h, g.apart_w], group=g.groups,
    )  # fmt: skip


def _convolution_relu_pool(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    rectified = graph.node("Relu", [_convolution(graph, inputs, context, tensor)])
    return graph.node("MaxPool", [rectified], kernel_shape=[2, 2], strides=[2, 2])


def _transposed_convolution(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    g = context.geometry
    more = [
        size - (count - 1) * g.stride + 2 * pad - reach
        for size, count, pad, reach in (
            (g.height, g.out_height, g.pad_h, g.reach_h), (g.width, g.out_width, g.pad_w, g.reach_w),
        )
    ]  # fmt: skip
    return graph.node(
        "ConvTranspose", inputs, kernel_shape=[g.kernel_h, g.kernel_w], strides=[g.stride, g.stride],
        pads=[g.pad_h, g.pad_w, g.pad_h, g.pad_w], output_padding=more, dilations=[g.apart_h, g.apart_w],
        group=g.groups,
    )  # fmt: skip


def _adaptive_pooling(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    """Means of windows of different sizes: products with the matrices of the rows' and the columns' means."""
    (x,) = context.inputs
    rows, columns = (_means(x.shape[axis], tensor.shape[axis]) for axis in (2, 3))
    return graph.node("MatMul", [graph.values(rows), graph.node("MatMul", [*inputs, graph.values(columns.T.copy())])])


def _means(size: int, count: int) -> np.ndarray:
    """Return the matrix [count, size] of the means of windows that cover `size` numbers, as PyTorch cuts them."""
    found = np.zeros((count, size), np.float32)
    for window, row in enumerate(found):
        start, stop = window * size // count, -(-(window + 1) * size // count)
        row[start:stop] = 1.0 / (stop - start)
    return found


def _pooling(kind: str, **more: Any) -> Writer:
    def write(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
        *_, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w = context.window
        return graph.node(
            kind, inputs, kernel_shape=[kernel_h, kernel_w], strides=[stride_h, stride_w],
            pads=[pad_h, pad_w, pad_h, pad_w], **more,
        )  # fmt: skip

    return write


def _reshape(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    return graph.node("Reshape", [*inputs, graph.sizes(tensor)])


def _sum(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    (x,), kept = context.inputs, context.kept
    axes = [d for d, (size, left) in enumerate(zip(x.shape, kept, strict=True)) if size != left]
    if any(graph.samples(x)[d] for d in axes):
        refuse("samples to stay apart, got a sum over the first dimension")
    total = graph.node("ReduceSum", [*inputs, graph.whole_numbers(axes)], keepdims=1) if axes else inputs[0]
    if context.scale != 1.0:
        total = graph.node("Mul", [total, graph.number(context.scale)])
    return graph.node("Reshape", [total, graph.sizes(tensor)])


def _slice(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    starts, steps, sizes = context.starts, context.steps, tensor.shape
    (x,) = context.inputs
    axes = [d for d, count in enumerate(graph.samples(x)) if not count]
    if any((starts[d], steps[d], sizes[d]) != (0, 1, x.shape[d]) for d in range(x.ndim) if d not in axes):
        refuse("samples to stay apart, got a part of the first dimension")
    # The end of a backward slice that reaches element 0 is before it: a number that no length can turn into an element.
    ends = [starts[d] + (sizes[d] - 1) * steps[d] + (1 if steps[d] > 0 else -1) for d in axes]
    ends = [_BEFORE_ALL if end < 0 else end for end in ends]
    parts = [starts[d] for d in axes], ends, axes, [steps[d] for d in axes]
    return graph.node("Slice", [*inputs, *map(graph.whole_numbers, parts)])


def _pad(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    (x,), starts = context.inputs, context.starts
    after = [size - start - own for size, start, own in zip(tensor.shape, starts, x.shape, strict=True)]
    return graph.node("Pad", [*inputs, graph.whole_numbers([*starts, *after]), graph.number(context.value)])


def _embedding(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    indices = graph.fixed(context, lambda node: node.indices)
    return graph.node("Gather", [*inputs, graph.name(indices)], axis=0)


def _concat(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    if context.is_new:
        places = graph.whole_numbers([context.axis])
        inputs = [graph.node("Unsqueeze", [each, places]) for each in inputs]
    elif any(graph.samples(each)[context.axis] for each in context.inputs):
        refuse("samples to stay apart, got a concat along the first dimension")
    return graph.node("Concat", inputs, axis=context.axis)


def _gelu(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    (x,) = inputs
    gate = graph.node("Erf", [graph.node("Mul", [x, graph.number(math.sqrt(0.5))])])
    return _half_gated(graph, x, gate)


def _gelu_tanh(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    (x,) = inputs
    cube = graph.node("Mul", [graph.node("Mul", [x, x]), x])
    inner = graph.node("Add", [x, graph.node("Mul", [cube, graph.number(0.044715)])])
    return _half_gated(graph, x, graph.node("Tanh", [graph.node("Mul", [inner, graph.number(math.sqrt(2 / math.pi))])]))


def _half_gated(graph: Graph, x: str, gate: str) -> str:
    both = graph.node("Mul", [x, graph.node("Add", [gate, graph.number(1.0)])])
    return graph.node("Mul", [both, graph.number(0.5)])


def _silu(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    return graph.node("Mul", [*inputs, graph.node("Sigmoid", inputs)])


def _leaky_relu(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    return graph.node("LeakyRelu", inputs, alpha=context.settings[0])


def _layer_norm(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    first = next(d for d in range(tensor.ndim - 1, -1, -1) if math.prod(tensor.shape[d:]) == context.columns)
    shape = tensor.shape[first:]
    if any(graph.samples(tensor)[first:]):
        refuse("samples to stay apart, got a layer norm over them")
    x, weight, bias = inputs[0], *(None if each is None else graph.name(each) for each in context.inputs[1:])
    weight = weight or graph.number(1.0, shape)
    return graph.node("LayerNormalization", [x, weight, *([bias] if bias else [])], axis=first, epsilon=context.eps)


def _batch_norm(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    if context.statistics != GIVEN:
        refuse("batch norm with running statistics, got one without")
    x, channels = inputs[0], tensor.shape[1:2]
    weight, bias = (None if each is None else graph.name(each) for each in context.inputs[1:])
    own = [weight or graph.number(1.0, channels), bias or graph.number(0.0, channels)]
    running = [graph.name(each) for each in context.running[:2]]
    return graph.node("BatchNormalization", [x, *own, *running], epsilon=context.eps)


def _affine(graph: Graph, inputs: list[str], context: Context, tensor: Tensor) -> str:
    scaled = inputs[0] if context.scale == 1.0 else graph.node("Mul", [*inputs, graph.number(context.scale)])
    return scaled if context.shift == 0.0 else graph.node("Add", [scaled, graph.number(context.shift)])


def _simple(kind: str, **attributes: Any) -> Writer:
    return lambda graph, inputs, context, tensor: graph.node(kind, inputs, **attributes)


#: Functions that add an operation's nodes, by operation.
WRITERS: dict[type[Op], Writer] = {
    LinearOp: _linear,
    MatMul: _simple("MatMul"),
    BatchedMatMul: _batched_product,
    Conv2dOp: _convolution,
    ConvReluPoolOp: _convolution_relu_pool,
    ConvTranspose2dOp: _transposed_convolution,
    AdaptiveAvgPool2dOp: _adaptive_pooling,
    MaxPool2dOp: _pooling("MaxPool"),
    AvgPool2dOp: _pooling("AveragePool", count_include_pad=1),
    Relu: _simple("Relu"),
    SigmoidOp: _simple("Sigmoid"),
    TanhOp: _simple("Tanh"),
    SoftmaxOp: _simple("Softmax", axis=-1),
    LogSoftmaxOp: _simple("LogSoftmax", axis=-1),
    Add: _simple("Add"),
    Sub: _simple("Sub"),
    Mul: _simple("Mul"),
    Div: _simple("Div"),
    Gelu: _gelu,
    GeluTanh: _gelu_tanh,
    Silu: _silu,
    LeakyRelu: _leaky_relu,
    LayerNormOp: _layer_norm,
    BatchNormOp: _batch_norm,
    EmbeddingOp: _embedding,
    SumOp: _sum,
    SliceOp: _slice,
    Concat: _concat,
    Pad: _pad,
    Affine: _affine,
    DivideNumber: lambda graph, inputs, context, tensor: graph.node("Div", [graph.number(context.number), *inputs]),
    Attention: attention,
    PackedAttention: packed_attention,
    LogSumExp: _simple("ReduceLogSumExp", axes=[-1], keepdims=0),
    Reshape: _reshape,
    Transpose: lambda graph, inputs, context, tensor: graph.node("Transpose", inputs, perm=list(context.axes)),
}
