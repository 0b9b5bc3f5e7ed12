"""The tape as a list: the operations from which a tensor was computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from clcomm.base.errors import ArgumentError
from clcomm.engine.tensor import Tensor

if TYPE_CHECKING:
    from clcomm.engine.device import Device

#: A node's attributes of whose tensors backward reads no values; an operation keeps what it reads in others.
_LOOKED_AT = frozenset({"inputs", "grad"})


def nodes_since(order: int, result: Tensor) -> list[Any]:
    """Return the nodes after `order` from which a tensor was computed, latest first."""
    return nodes_before(result._node, order)[0]


def nodes_before(root: Any, since: int = -1) -> tuple[list[Any], dict[int, int]]:
    """Return the nodes from which `root` was computed, latest first, and the number of uses of each leaf with hooks.

    The uses are by the leaf's id. since: none before this order.
    """
    uses: dict[int, int] = {}
    nodes, seen, waiting = [], {root}, [root]
    while waiting:
        node = waiting.pop()
        if node.inputs is None:
            raise ArgumentError(
                "backward: this graph ran backward before and released its tensors; run forward "
                "again, or use retain_graph=True before"
            )
        nodes.append(node)
        for x, producer, needed in zip(node.inputs, node.producers, node.needs, strict=True):
            if needed:
                if producer is None:
                    if x._hooks:
                        uses[id(x)] = uses.get(id(x), 0) + 1
                elif producer not in seen and producer.order > since:
                    seen.add(producer)
                    waiting.append(producer)
    nodes.sort(key=lambda node: node.order, reverse=True)
    return nodes, uses


def tape_of(results: Sequence[Tensor]) -> list[Any]:
    """Return the nodes from which tensors were computed, latest first; ArgumentError if what they kept has changed."""
    nodes = {node for each in results if each._node is not None for node in nodes_before(each._node)[0]}
    listed = sorted(nodes, key=lambda node: node.order, reverse=True)
    if listed:
        require_unwritten(listed, results[0].device)
    return listed


def require_unwritten(nodes: Sequence[Any], device: Device) -> None:
    """Raise ArgumentError where values that an operation kept for its backward were overwritten since.

    nodes: latest first.
    """
    if device.written_at <= nodes[-1].order:
        return
    for node in nodes:
        for kept in _tensors(value for name, value in vars(node).items() if name not in _LOOKED_AT):
            if kept.written_at > node.order:
                name = node.op.__name__.removesuffix("Op")
                raise ArgumentError(
                    f"backward: {name} kept a tensor of shape {kept.shape}, which was overwritten after it (by an "
                    "optimizer's step, a synchronisation, copy_from or an operation in place); run forward again"
                )


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Return the tensors among values, and those in tuples, lists and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
