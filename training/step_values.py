"""The values of one training step, in the order in which they are computed: what a replay prints and compares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from clcomm.engine import Parameter, Tensor
from clcomm.engine.tape import nodes_before
from training.engines.parts import Parts


class Value(NamedTuple):
    """An array of a step.

    Attributes:
        what: "forward": an operation's result; "gradient": of a parameter, a shard's own; "mean": the averaged and
            clipped one, from which the optimizer steps; "parameter": after the step.
        shard: whose it is, None for those of all.
        name: of the layer or parameter.
    """

    what: str
    shard: int | None
    name: str


class StepValues:
    """Runs forward and backward of one step of a native engine's model as Python, and keeps what they compute.

    Attributes:
        arrays: copies on the host, by Value.

    Args:
        parts: the model's.
        shard: whose batches come first; the rank without logical shards.
    """

    def __init__(self, parts: Parts, shard: int = 0):
        self._parts = parts
        self.arrays: dict[Value, np.ndarray] = {}
        self.begin(shard)

    def begin(self, shard: int) -> None:
        """Take what follows as a shard's."""
        self._shard, self._batch = shard, 0

    def forward_backward(self, inputs: Any, targets: Any, weight: float) -> Any:
        """Do what `Parts.forward_backward` does; the gradients kept are those of all micro-batches so far."""
        loss = self._parts.loss_fn(self._parts.model(inputs), targets)
        self._batch += 1
        for name, result in self._named_results(loss):
            self.arrays[Value("forward", self._shard, name)] = result.numpy()
        loss.backward(weight)
        self._keep("gradient", self._shard)
        return loss.detach()

    def keep_mean(self) -> None:
        """Keep the averaged gradients."""
        self._keep("mean", None)

    def keep_parameters(self) -> None:
        """Keep the parameters after the step."""
        for name, parameter in self._parts.model.named_parameters():
            self.arrays[Value("parameter", None, name)] = parameter.numpy()

    def _keep(self, what: str, shard: int | None) -> None:
        for name, parameter in reversed(list(self._parts.model.named_parameters())):
            if parameter.grad is not None:
                self.arrays[Value(what, shard, name)] = parameter.grad.numpy()

    def _named_results(self, loss: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each operation's result and a name: its number, its layer, where it has parameters, and its kind."""
        layers = {id(each): name.rpartition(".")[0] for name, each in self._parts.model.named_parameters()}
        batch = f"batch {self._batch}: " if self._batch > 1 else ""
        for number, (kind, inputs, result) in enumerate(operations_before(loss), 1):
            own = [layers[id(each)] for each in inputs if isinstance(each, Parameter) and id(each) in layers]
            yield f"{batch}{number} {f'{own[0]} ' if own else ''}{kind}", result


def operations_before(root: Tensor) -> list[tuple[str, tuple[Tensor | None, ...], Tensor]]:
    """Return the operations from which `root` was computed, the first one first: kind, inputs and result.

    Those that need gradients, before `backward()`.
    """
    nodes = sorted(nodes_before(root._node)[0], key=lambda node: node.order)
    results = {producer: x for node in nodes for x, producer in zip(node.inputs, node.producers, strict=True)}
    return [(node.op.__name__.removesuffix("Op"), node.inputs, results.get(node, root)) for node in nodes]
