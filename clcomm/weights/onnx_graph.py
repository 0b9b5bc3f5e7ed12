"""The nodes and values of an ONNX graph, from the tapes of two forward passes.

The passes have different numbers of samples: a dimension that differs between them is so many times the number of
samples, and every other one is fixed. So nothing is guessed from a size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import numpy as np

from clcomm.engine.autograd import Context, Op
from clcomm.engine.fusion import one_by_one
from clcomm.engine.nn import Module
from clcomm.engine.nn.module import evaluating
from clcomm.engine.tensor import Shape, Tensor
from clcomm.errors import ArgumentError

#: Versions that are read by every onnxruntime of the last years.
_OPSET, _IR_VERSION = 17, 8
#: Samples of the two passes.
_SAMPLES = 3, 5


class Graph:
    """The graph of a model's computation, made by walking from a result back to the input.

    Args:
        model: in eval mode, with one input tensor.
        writers: functions that add each operation's nodes.

    Raises ArgumentError for computations without an ONNX form.
    """

    def __init__(
        self,
        onnx: Any,
        model: Module,
        in_shape: tuple[int, ...],
        in_dtype: np.dtype,
        writers: Mapping[type[Op], Writer],
    ):
        self._onnx, self._in_dtype, self._in_shape = onnx, in_dtype, in_shape
        parameters = list(model.named_parameters())
        device = parameters[0][1].device if parameters else None
        inputs = [
            Tensor(np.zeros((count, *in_shape), in_dtype), device, requires_grad=in_dtype == np.float32)
            for count in _SAMPLES
        ]
        with evaluating(model), one_by_one():
            results = [model(x) for x in inputs]
        self._names: dict[int, str] = {id(inputs[0]): "x"}
        self._kept = [*inputs, *results]  # an id means nothing without its tensor
        self._parameters = {id(tensor): name for name, tensor in (*parameters, *model.named_buffers())}
        self._nodes: list[object] = []
        self._weights: list[object] = []
        self._result = results[0]
        self._samples = {id(inputs[0]): (1,) + (0,) * len(in_shape)}
        self._twins: dict[int, object] = {}
        tensors, twins = _in_order(results[0]), _in_order(results[1])
        if [each._node.op for each in tensors] != [each._node.op for each in twins]:  # type: ignore[union-attr]
            raise ArgumentError("model: expected the same operations for any number of samples for ONNX, got others")
        for tensor, twin in zip(tensors, twins, strict=True):
            self._pair(tensor, twin)
        for tensor in tensors:
            self._add(tensor, writers)

    def _pair(self, tensor: Tensor, twin: Tensor) -> None:
        """Relate a tensor of the first pass to its twin of the second, by the dimensions that depend on the samples."""
        self._twins[id(tensor._node)] = twin._node
        pairs = zip((tensor, *tensor._node.inputs), (twin, *twin._node.inputs), strict=True)  # type: ignore[union-attr,misc]
        for each, other in pairs:
            if each is not None and id(each) not in self._samples:
                self._kept.append(each)
                self._samples[id(each)] = samples_of(each.shape, other.shape)

    def _add(self, tensor: Tensor, writers: Mapping[type[Op], Writer]) -> None:
        context = tensor._node
        assert isinstance(context, Context)
        write = writers.get(context.op)
        if write is None:
            known = ", ".join(sorted(op.__name__.removesuffix("Op") for op in writers))
            got = context.op.__name__.removesuffix("Op")
            raise ArgumentError(f"model: expected operations among {known} for ONNX, got {got}")
        inputs = [self.name(each) for each in context.inputs if each is not None]
        self._names[id(tensor)] = write(self, inputs, context, tensor)

    def finish(self) -> Any:
        helper, floats = self._onnx.helper, self._onnx.TensorProto.FLOAT
        shape = self._result.shape
        if self._samples.get(id(self._result)) != (1,) + (0,) * (len(shape) - 1):
            refuse(f"the samples to stay the first dimension, got a result of shape {shape} for {_SAMPLES[0]} samples")
        self.node("Identity", [self.name(self._result)], out="y")
        graph = helper.make_graph(
            self._nodes,
            "clcomm",
            [
                helper.make_tensor_value_info(
                    "x", helper.np_dtype_to_tensor_dtype(self._in_dtype), ["N", *self._in_shape]
                )
            ],
            [helper.make_tensor_value_info("y", floats, ["N", *shape[1:]])],
            self._weights,
        )
        whole = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], producer_name="clcomm")
        whole.ir_version = _IR_VERSION
        self._onnx.checker.check_model(whole, full_check=True)
        return whole

    # --- for writers ---

    def node(self, kind: str, inputs: list[str], out: str = "", **attributes: object) -> str:
        name = out or f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(self._onnx.helper.make_node(kind, inputs, [name], **attributes))
        return name

    def name(self, tensor: Tensor) -> str:
        """Return a tensor's name; a parameter or a constant becomes part of the graph when it is first used."""
        if id(tensor) not in self._names:
            if any(self._samples.get(id(tensor), ())):
                refuse(f"values that do not depend on the number of samples, got {tensor.shape} beside the input")
            self._kept.append(tensor)
            name = self._parameters.get(id(tensor), f"constant_{len(self._weights)}")
            free = f"{name}.values" if name in ("x", "y") else name
            self._names[id(tensor)] = self.constant(free, tensor.numpy())
        return self._names[id(tensor)]

    def fixed(self, context: Context, part: Callable[[Any], Tensor]) -> Tensor:
        """Return a tensor attribute of a node; refused if its shape depends on the samples.

        part: returns the tensor, perhaps the input itself, for a node.
        """
        tensor, other = part(context), part(self._twins[id(context)])
        if id(tensor) not in self._names and tensor.shape != other.shape:
            refuse(f"values that do not depend on the number of samples, got {tensor.shape} beside the input")
        return tensor

    def samples(self, tensor: Tensor) -> tuple[int, ...]:
        """Return, for each dimension, how many times the number of samples it is; 0: it does not depend on them."""
        return self._samples[id(tensor)]

    def constant(self, name: str, values: np.ndarray) -> str:
        self._weights.append(self._onnx.numpy_helper.from_array(values, name))
        return name

    def values(self, values: np.ndarray) -> str:
        return self.constant(f"values_{len(self._weights)}", values)

    def number(self, value: float, shape: tuple[int, ...] = ()) -> str:
        """Add a constant tensor of `shape` filled with a number, and return its name."""
        return self.values(np.full(shape, value, np.float32))

    def whole_numbers(self, values: Iterable[int]) -> str:
        return self.values(np.array([*values], np.int64))

    def sizes(self, tensor: Tensor) -> str:
        """Add a tensor's shape, with the dimension of the samples open, and return its name."""
        samples = self.samples(tensor)
        if sum(map(bool, samples)) > 1:
            refuse(f"one dimension of samples, got {tensor.shape} for {_SAMPLES[0]}")
        return self.whole_numbers(-1 if count else size for size, count in zip(tensor.shape, samples, strict=True))


#: Adds an operation's nodes: (graph, names of its inputs, its place on the tape, its result) -> name of the result.
Writer = Callable[[Graph, list[str], Context, Tensor], str]


def refuse(what: str) -> NoReturn:
    """Raise ArgumentError for a model; what: the expected and the actual value."""
    raise ArgumentError(f"model: for ONNX expected {what}")


def samples_of(one: Shape, other: Shape) -> tuple[int, ...]:
    """Return each size as a multiple of the number of samples, 0 for fixed ones, from the shapes of both passes."""
    few, many = _SAMPLES
    if len(one) != len(other) or any(
        a != b and (a % few or a * many != b * few) for a, b in zip(one, other, strict=True)
    ):
        refuse(f"sizes that grow with the number of samples or not at all, got {one} for {few} and {other} for {many}")
    return tuple(0 if a == b else a // few for a, b in zip(one, other, strict=True))


def _in_order(result: Tensor) -> list[Tensor]:
    """Return a result and the tensors it was computed from, in the order of computation."""
    found: dict[int, Tensor] = {}
    waiting = [result]
    while waiting:
        tensor = waiting.pop()
        if tensor._node is not None and id(tensor) not in found:
            found[id(tensor)] = tensor
            inputs = [each for each in tensor._node.inputs or () if each is not None]
            if any(each._node not in tensor._node.producers for each in inputs):
                refuse("operations that leave their inputs as they are, got one in place, such as x += y")
            waiting += inputs
    return sorted(found.values(), key=lambda tensor: tensor._node.order)  # type: ignore[union-attr]
