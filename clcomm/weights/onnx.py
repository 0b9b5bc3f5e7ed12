"""A native model as an ONNX graph (https://onnx.ai/onnx/operators), from the tape of one forward pass in eval mode.

The number of samples stays open. What a model computes outside the tape, in NumPy for example, is not seen.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from clcomm.engine.autograd import Op
from clcomm.engine.nn import Module
from clcomm.engine.nn.module import evaluating
from clcomm.engine.ops.activation import Relu, Sigmoid, Tanh
from clcomm.engine.ops.batch_norm import GIVEN, BatchNorm
from clcomm.engine.ops.batched_matmul import BatchedMatMul
from clcomm.engine.ops.blocks import Concat, Slice
from clcomm.engine.ops.conv2d import Conv2dOp, ConvReluPoolOp
from clcomm.engine.ops.elementwise import Add, Div, Mul, Sub
from clcomm.engine.ops.embedding import Embedding
from clcomm.engine.ops.gated import Gelu, GeluTanh, LeakyRelu, Silu
from clcomm.engine.ops.layer_norm import LayerNorm
from clcomm.engine.ops.matmul import LinearOp, MatMul
from clcomm.engine.ops.pool import AvgPool2dOp, MaxPool2dOp
from clcomm.engine.ops.reduce import Sum
from clcomm.engine.ops.shape import Reshape, Transpose
from clcomm.engine.ops.softmax import LogSoftmax, Softmax
from clcomm.engine.tensor import Tensor
from clcomm.errors import ArgumentError
from clcomm.storage.files import replacing, saving

#: Versions that are read by every onnxruntime of the last years.
_OPSET, _IR_VERSION = 17, 8
#: The end of a slice towards element 0, which is in it.
_BEFORE_ALL = -(1 << 62)
#: Samples of the pass that is followed: a number that no layer's size is likely to be.
_SAMPLES = 3


def export_onnx(model: Module, path: str | os.PathLike, in_shape: Iterable[int], *, in_dtype: str = "float32") -> None:
    """Write a model as an ONNX file with the input "x", [N, *in_shape], and the output "y".

    Args:
        model: any module of the engine whose forward takes one tensor.
        path: of the file.
        in_shape: the shape of one sample.
        in_dtype: "float32", or "int32" for a model whose input is indices, as of an Embedding.

    Raises:
        ArgumentError: onnx is not installed, the model does not take such samples, or computes what has no form here.
        CheckpointWriteError: the file could not be written; an old one is kept.
    """
    try:
        import onnx
    except ImportError:
        raise ArgumentError("onnx is not installed; do: pip install 'clcomm[onnx]'") from None
    if in_dtype not in ("float32", "int32"):
        raise ArgumentError(f"in_dtype: expected 'float32' or 'int32', got {in_dtype!r}")
    sample = tuple(in_shape)
    graph = _Graph(onnx, model, sample, np.dtype(in_dtype))
    data = graph.finish(sample).SerializeToString()
    with saving("model", path), replacing(path) as file:
        file.write(data)


class _Graph:
    """The nodes and values of a graph, made by walking from a result back to the input."""

    def __init__(self, onnx: Any, model: Module, in_shape: tuple[int, ...], in_dtype: np.dtype):
        parameters = list(model.named_parameters())
        device = parameters[0][1].device if parameters else None
        x = Tensor(np.zeros((_SAMPLES, *in_shape), in_dtype), device, requires_grad=in_dtype == np.float32)
        self._onnx, self._in_dtype = onnx, in_dtype
        self._names: dict[int, str] = {id(x): "x"}
        self._kept: list[Tensor] = [x]  # an id means nothing without its tensor
        self._parameters = {id(tensor): name for name, tensor in (*parameters, *model.named_buffers())}
        self._nodes: list[Any] = []
        self.weights: list[Any] = []
        with evaluating(model):
            self._result = model(x)
        for tensor in _in_order(self._result):
            self._add(tensor)

    def finish(self, in_shape: tuple[int, ...]) -> Any:
        """Return the checked model."""
        helper, floats = self._onnx.helper, self._onnx.TensorProto.FLOAT
        self.node("Identity", [self.name(self._result)], out="y")
        graph = helper.make_graph(
            self._nodes,
            "clcomm",
            [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(self._in_dtype), ["N", *in_shape])],
            [helper.make_tensor_value_info("y", floats, ["N", *self._result.shape[1:]])],
            self.weights,
        )
        whole = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], producer_name="clcomm")
        whole.ir_version = _IR_VERSION
        self._onnx.checker.check_model(whole, full_check=True)
        return whole

    def _add(self, tensor: Tensor) -> None:
        context: Any = tensor._node
        write = _WRITERS.get(context.op)
        if write is None:
            known = ", ".join(sorted(op.__name__ for op in _WRITERS))
            raise ArgumentError(f"model: expected operations among {known} for ONNX, got {context.op.__name__}")
        inputs = [self.name(each) for each in context.inputs if each is not None]
        self._kept.append(tensor)
        self._names[id(tensor)] = write(self, inputs, context, tensor)

    def node(self, kind: str, inputs: list[str], out: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its result."""
        name = out or f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(self._onnx.helper.make_node(kind, inputs, [name], **attributes))
        return name

    def name(self, tensor: Tensor) -> str:
        """Return a tensor's name; a parameter or a constant becomes part of the graph when it is first used."""
        if id(tensor) not in self._names:
            self._kept.append(tensor)
            name = self._parameters.get(id(tensor), f"constant_{len(self.weights)}")
            free = f"{name}.values" if name in ("x", "y") else name
            self._names[id(tensor)] = self.constant(free, tensor.numpy())
        return self._names[id(tensor)]

    def constant(self, name: str, values: np.ndarray) -> str:
        """Add values under a name, and return it."""
        self.weights.append(self._onnx.numpy_helper.from_array(values, name))
        return name

    def number(self, value: float, shape: tuple[int, ...] = ()) -> str:
        """Add a number, as often as a shape has elements, and return its name."""
        return self.constant(f"number_{len(self.weights)}", np.full(shape, value, np.float32))

    def whole_numbers(self, values: Iterable[int]) -> str:
        """Add a list of whole numbers, and return its name."""
        return self.constant(f"numbers_{len(self.weights)}", np.array([*values], np.int64))

    def sizes(self, shape: tuple[int, ...]) -> str:
        """Add a shape whose first size is that of the samples, and return its name."""
        return self.constant(f"shape_{len(self.weights)}", np.array([-1, *shape[1:]], np.int64))


def _in_order(result: Tensor) -> list[Tensor]:
    """Return the tensors from which a result was computed, and itself, in the order in which they were."""
    found: dict[int, Tensor] = {}
    waiting = [result]
    while waiting:
        tensor = waiting.pop()
        if tensor._node is not None and id(tensor) not in found:
            found[id(tensor)] = tensor
            waiting += [each for each in tensor._node.inputs or () if each is not None]
    return sorted(found.values(), key=lambda tensor: tensor._node.order)  # type: ignore[union-attr]


def _linear(graph: _Graph, inputs: list[str], context: Any, tensor: Tensor) -> str:
    product = graph.node("Gemm", inputs, transB=1)
    return graph.node("Relu", [product]) if context.mask is not None else product


def _batched_product(graph: _Graph, inputs: list[str], context: Any, tensor: Tensor) -> str:
    factors = []
    for name, factor, is_turned in zip(inputs, context.inputs, context.turned, strict=True):
        order = [*range(factor.ndim - 2), factor.ndim - 1, factor.ndim - 2]
        factors.append(graph.node("Transpose", [name], perm=order) if is_turned else name)
    return graph.node("MatMul", factors)


def _convolution(graph: _Graph, inputs: list[str], context: Any, tensor: Tensor) -> str:
    g = context.geometry
    return graph.node(
        "Conv", inputs, kernel_shape=[g.kernel_h, g.kernel_w], strides=[g.stride, g.stride],
        pads=[g.pad_h, g.pad_w, g.pad_h, g.pad_w],
    )  # fmt: skip


def _convolution_relu_pool(graph: _Graph, inputs: list[str], context: Any, tensor: Tensor) -> str:
    rectified = graph.node("Relu", [_convolution(graph, inputs, context, tensor)])
    return graph.node("MaxPool", [rectified], kernel_shape=[2, 2], strides=[2, 2])


def _pooling(kind: str, **more: Any) -> _Writer:
    def write(graph: _Graph, inputs: list[str], context: Any, tensor: Tensor) -> str:
        *_, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w = context.window
        return graph.node(
            kind, inputs, kernel_shape=[kernel_h, kernel_w], strides=[stride_h, stride_w],
            pads=[pad_h, pad_w, pad_h, pad_w], **more,
        )  # fmt: skip

    return write


def _reshape(graph: _Graph, inputs: list[str], context: Any, tensor: Tensor) -> str:
    before = context.inputs[0].shape
    if context.inputs[0]._node is None and inputs != ["x"]:
        return graph.constant(f"constant_{len(graph.weights)}", tensor.numpy())
    if before[:1] != (_SAMPLES,) or tensor.shape[:1] != (_SAMPLES,):
        raise ArgumentError(
            f"model: expected the samples to stay the first dimension for ONNX, got a reshape from {before} to "
            f"{tensor.shape} with {_SAMPLES} samples"
        )
    return graph.node("Reshape", [*inputs, graph.sizes(tensor.shape)])


def _sum(graph: _Graph, inputs: list[str], context: Any, tensor: Tensor) -> str:
    before, kept = context.inputs[0].shape, context.kept
    if before[:1] != (_SAMPLES,) or kept[0] == 1:
        raise ArgumentError("model: expected samples to stay apart for ONNX, got a sum over the first dimension")
    axes = [d for d, (size, left) in enumerate(zip(before, kept, strict=True)) if size != left]
    total = graph.node("ReduceSum", [*inputs, graph.whole_numbers(axes)], keepdims=1) if axes else inputs[0]
    if context.scale != 1.0:
        total = graph.node("Mul", [total, graph.number(context.scale)])
    return graph.node("Reshape", [total, graph.sizes(tensor.shape)])


def _slice(graph: _Graph, inputs: list[str], context: Any, tensor: Tensor) -> str:
    starts, steps, sizes = context.starts, context.steps, tensor.shape
    before = context.inputs[0].shape
    if before[:1] != (_SAMPLES,) or (starts[0], steps[0], sizes[0]) != (0, 1, _SAMPLES):
        raise ArgumentError("model: expected samples to stay apart for ONNX, got a part of the first dimension")
    # The end of a backward slice that reaches element 0 is before it: a number that no length can turn into an element.
    ends = [
        start + (size - 1) * step + (1 if step > 0 else -1)
        for start, size, step in zip(starts, sizes, steps, strict=True)
    ]
    ends = [_BEFORE_ALL if end < 0 else end for end in ends]
    axes = range(1, len(sizes))
    return graph.node("Slice", [*inputs, *map(graph.whole_numbers, (starts[1:], ends[1:], axes, steps[1:]))])


def _embedding(graph: _Graph, inputs: list[str], context: Any, tensor: Tensor) -> str:
    return graph.node("Gather", [*inputs, graph.name(context.indices)], axis=0)


def _concat(graph: _Graph, inputs: list[str], context: Any, tensor: Tensor) -> str:
    if context.axis == 0:
        raise ArgumentError("model: expected samples to stay apart for ONNX, got a concat along the first dimension")
    return graph.node("Concat", inputs, axis=context.axis)


def _gelu(graph: _Graph, inputs: list[str], context: Any, tensor: Tensor) -> str:
    (x,) = inputs
    gate = graph.node("Erf", [graph.node("Mul", [x, graph.number(math.sqrt(0.5))])])
    return _half_gated(graph, x, gate)


def _gelu_tanh(graph: _Graph, inputs: list[str], context: Any, tensor: Tensor) -> str:
    (x,) = inputs
    cube = graph.node("Mul", [graph.node("Mul", [x, x]), x])
    inner = graph.node("Add", [x, graph.node("Mul", [cube, graph.number(0.044715)])])
    return _half_gated(graph, x, graph.node("Tanh", [graph.node("Mul", [inner, graph.number(math.sqrt(2 / math.pi))])]))


def _half_gated(graph: _Graph, x: str, gate: str) -> str:
    """Return x * (1 + gate) / 2."""
    both = graph.node("Mul", [x, graph.node("Add", [gate, graph.number(1.0)])])
    return graph.node("Mul", [both, graph.number(0.5)])


def _silu(graph: _Graph, inputs: list[str], context: Any, tensor: Tensor) -> str:
    return graph.node("Mul", [*inputs, graph.node("Sigmoid", inputs)])


def _leaky_relu(graph: _Graph, inputs: list[str], context: Any, tensor: Tensor) -> str:
    return graph.node("LeakyRelu", inputs, alpha=context.settings[0])


def _layer_norm(graph: _Graph, inputs: list[str], context: Any, tensor: Tensor) -> str:
    first = next(d for d in range(tensor.ndim - 1, -1, -1) if math.prod(tensor.shape[d:]) == context.columns)
    shape = tensor.shape[first:]
    x, weight, bias = inputs[0], *(None if each is None else graph.name(each) for each in context.inputs[1:])
    weight = weight or graph.number(1.0, shape)
    return graph.node("LayerNormalization", [x, weight, *([bias] if bias else [])], axis=first, epsilon=context.eps)


def _batch_norm(graph: _Graph, inputs: list[str], context: Any, tensor: Tensor) -> str:
    if context.statistics != GIVEN:
        raise ArgumentError("model: expected batch norm to have running statistics for ONNX, got one without")
    x, channels = inputs[0], tensor.shape[1:2]
    weight, bias = (None if each is None else graph.name(each) for each in context.inputs[1:])
    own = [weight or graph.number(1.0, channels), bias or graph.number(0.0, channels)]
    running = [graph.name(each) for each in context.running[:2]]
    return graph.node("BatchNormalization", [x, *own, *running], epsilon=context.eps)


def _simple(kind: str, **attributes: Any) -> _Writer:
    return lambda graph, inputs, context, tensor: graph.node(kind, inputs, **attributes)


#: Adds an operation's nodes: (graph, names of its inputs, its place on the tape, its result) -> name of the result.
_Writer = Callable[[_Graph, list[str], Any, Tensor], str]
_WRITERS: dict[type[Op], _Writer] = {
    LinearOp: _linear,
    MatMul: _simple("MatMul"),
    BatchedMatMul: _batched_product,
    Conv2dOp: _convolution,
    ConvReluPoolOp: _convolution_relu_pool,
    MaxPool2dOp: _pooling("MaxPool"),
    AvgPool2dOp: _pooling("AveragePool", count_include_pad=1),
    Relu: _simple("Relu"),
    Sigmoid: _simple("Sigmoid"),
    Tanh: _simple("Tanh"),
    Softmax: _simple("Softmax", axis=-1),
    LogSoftmax: _simple("LogSoftmax", axis=-1),
    Add: _simple("Add"),
    Sub: _simple("Sub"),
    Mul: _simple("Mul"),
    Div: _simple("Div"),
    Gelu: _gelu,
    GeluTanh: _gelu_tanh,
    Silu: _silu,
    LeakyRelu: _leaky_relu,
    LayerNorm: _layer_norm,
    BatchNorm: _batch_norm,
    Embedding: _embedding,
    Sum: _sum,
    Slice: _slice,
    Concat: _concat,
    Reshape: _reshape,
    Transpose: lambda graph, inputs, context, tensor: graph.node("Transpose", inputs, perm=list(context.axes)),
}
