"""Gradients as results: `grad` leaves those of the parameters alone, and can put its own on the tape.

Where gradients are to have gradients, each operation's is made of other operations, by the rules of `second_order.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.engine import second_order, second_order_forms
from clcomm.engine.autograd import Context, hooked, seed_of
from clcomm.engine.creation import zeros_like
from clcomm.engine.functional import clone
from clcomm.engine.modes import apart
from clcomm.engine.tape import tape_of
from clcomm.engine.tensor import Tensor

__all__ = ["grad"]

Tensors = Tensor | Sequence[Tensor]


def grad(
    outputs: Tensors,
    inputs: Tensors,
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the sum of outputs for each input, as torch.autograd.grad; no `.grad` changes.

    Args:
        outputs: tensors that need gradients.
        inputs: those whose gradients are wanted: leaves, or results on the way to the outputs.
        grad_outputs: the gradient of each output; None: 1, for outputs of one element.
        retain_graph: whether operations keep their tensors, for another backward; by default as `create_graph`.
        create_graph: whether the gradients have gradients in turn.
        allow_unused: None for an input that no output depends on, in place of an error.
        materialize_grads: zeros for it.

    Raises ArgumentError where an output needs no gradient, a gradient's shape does not fit, an input is unused, and
    with `create_graph` for an operation without a rule.
    """
    if not only_inputs or is_grads_batched:
        raise ArgumentError("grad: expected only_inputs=True and is_grads_batched=False, the only way here")
    ends, wanted = _listed("outputs", outputs), _listed("inputs", inputs)
    given = [grad_outputs] * len(ends) if grad_outputs is None else _listed("grad_outputs", grad_outputs, True)
    if len(given) != len(ends):
        raise ArgumentError(f"grad: grad_outputs: expected {len(ends)}, one for each output, got {len(given)}")
    for number, each in enumerate((*ends, *wanted)):
        if not each.requires_grad:
            name = f"outputs[{number}]" if number < len(ends) else f"inputs[{number - len(ends)}]"
            raise ArgumentError(f"grad: {name}: expected a tensor that needs a gradient, got one that does not")
    found = _Walk(wanted, create_graph).run(ends, [seed_of(*pair) for pair in zip(ends, given, strict=True)])
    for number, (value, each) in enumerate(zip(found, wanted, strict=True)):
        if value is None and materialize_grads:
            found[number] = zeros_like(each)
        elif value is None and not allow_unused:
            raise ArgumentError(f"grad: inputs[{number}]: no output depends on it; allow_unused=True returns None")
    if not (create_graph if retain_graph is None else retain_graph):
        for node in tape_of(ends):
            node.release()
    return tuple(found)


def _listed(name: str, given: Any, may_be_none: bool = False) -> list[Any]:
    values = [given] if isinstance(given, Tensor) else list(given)
    if not values or not all(isinstance(each, Tensor) or (each is None and may_be_none) for each in values):
        kinds = ", ".join(type(each).__name__ for each in values) or "none"
        raise ArgumentError(f"grad: {name}: expected a Tensor or several, got {kinds}")
    return values


class _Walk:
    """A way back over the tape that keeps the gradients of some tensors, and goes no further than to these."""

    def __init__(self, wanted: list[Tensor], create_graph: bool):
        self._wanted, self._recorded = wanted, create_graph
        self._leaves = {id(each) for each in wanted if each._node is None}
        self._nodes = {each._node for each in wanted if each._node is not None}
        self._totals: dict[object, Tensor] = {}  # by node, or by the id of a leaf

    def run(self, ends: list[Tensor], seeds: list[Tensor]) -> list[Tensor | None]:
        """Return the wanted gradients, None where there is none."""
        nodes = tape_of(ends)
        with apart(self._recorded, self._totals):
            for end, seed in zip(ends, seeds, strict=True):
                self._add(end._node or id(end), seed)
            for node, needs in self._on_the_way(nodes):
                total = self._totals.get(node)
                if total is not None:
                    self._step(node, needs, total)
            return [self._hooked(each, self._totals.get(each._node or id(each))) for each in self._wanted]

    def _on_the_way(self, nodes: list[Context]) -> list[tuple[Context, tuple[bool, ...]]]:
        """Return the nodes that lead to what is wanted, latest first, and for which inputs each does."""
        leading: dict[object, tuple[bool, ...]] = {}
        for node in reversed(nodes):
            pairs = zip(node.inputs, node.producers, node.needs, strict=True)
            needs = [needed and (id(x) in self._leaves if p is None else p in self._nodes or p in leading)
                     for x, p, needed in pairs]  # fmt: skip
            if any(needs):
                leading[node] = tuple(needs)
        return [(node, leading[node]) for node in nodes if node in leading]

    def _step(self, node: Context, needs: tuple[bool, ...], total: Tensor) -> None:
        for hook in node.hooks:
            total = self._totals[node] = hooked(hook, total)
        before, node.needs = node.needs, needs
        try:
            gradients = _by_rule(node, total) if self._recorded else node.op.backward(node, total)
        finally:
            node.needs = before
        for x, producer, value, needed in zip(node.inputs, node.producers, gradients, needs, strict=True):
            if needed and value is not None:
                self._add(producer or id(x), value)

    def _add(self, key: object, value: Tensor) -> None:
        before = self._totals.get(key)
        self._totals[key] = value if before is None else before + value

    @staticmethod
    def _hooked(x: Tensor, value: Tensor | None) -> Tensor | None:
        if x._node is None and value is not None:
            for hook, planned in x._hooks or ():
                value = value if planned is not None else hooked(hook, value)
        return value


def _by_rule(node: Context, total: Tensor) -> Sequence[Tensor | None]:
    """Return the gradients of an operation's inputs, made of operations.

    Raises ArgumentError where inputs that the rule reads were overwritten: the operation itself may have kept a copy.
    """
    if second_order.reads_inputs(node.op):
        for x in node.inputs:
            if x is not None and x.written_at > node.order:
                raise ArgumentError(
                    f"grad: create_graph: {node.op.__name__.removesuffix('Op')} had an input of shape {x.shape}, which "
                    "was overwritten after it (by an optimizer's step, or in place); run forward again"
                )
    form = second_order_forms.FORMS.get(node.op)
    if form is None:
        return second_order.gradients(node, total)
    own = [  # whose gradients are this operation's alone
        clone(x) if needs and x is not None else x for x, needs in zip(node.inputs, node.needs, strict=True)
    ]
    needed = [x for x, needs in zip(own, node.needs, strict=True) if needs and x is not None]
    found = iter(grad(form(node, *own), needed, total, create_graph=True))
    return [next(found) if needs else None for needs in node.needs]
