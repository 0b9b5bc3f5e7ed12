"""A model's layers with shapes and arithmetic, and each parameter's buckets.

Arithmetic is the operations of matrix products and convolutions for one sample: 2 for each multiply-add.
Activations, pooling and sums are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from clcomm.base.console.table import TextColumn, TextTable
from clcomm.base.flat_space.memory import MemoryUse
from clcomm.base.units import format_size

#: The columns that are dropped first on a narrow terminal.
_DROPPED_FIRST = ("ready", "bucket", "+backward", "MFLOP", "shape")


@dataclass(frozen=True)
class Layer:
    """A step of the forward pass: the shape of its result for one sample and its arithmetic, None where unknown."""

    name: str
    kind: str
    output_shape: tuple[int, ...] | None
    parameters: tuple[str, ...]
    forward_flops: int | None
    training_flops: int | None  # forward and backward


@dataclass(frozen=True)
class ParameterPlace:
    """A trained parameter, the buckets that hold it, and when its gradient is complete.

    Attributes:
        buckets: indices; several where the parameter is split.
        ready: its position in the order in which backward completes gradients, from 1.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    buckets: tuple[int, ...]
    ready: int


@dataclass(frozen=True)
class Summary:
    """All layers in the order of the forward pass, and all trained parameters in the model's order.

    Attributes:
        memory: the bytes of the model on each rank; None: unknown.
    """

    layers: tuple[Layer, ...]
    parameters: tuple[ParameterPlace, ...]
    memory: MemoryUse | None = None

    @property
    def parameter_count(self) -> int:
        """The number of trained values."""
        return sum(parameter.size for parameter in self.parameters)

    def flops(self, *, training: bool) -> int | None:
        """Return the operations for one sample, forward and, with `training`, backward; None: unknown."""
        values = [layer.training_flops if training else layer.forward_flops for layer in self.layers]
        return None if None in values else sum(value for value in values if value is not None)

    def as_dict(self) -> dict[str, object]:
        """Return the summary as plain values for JSON; docs/reports.md describes the fields."""
        return {
            "layers": [asdict(each) for each in self.layers],
            "parameters": [asdict(p) for p in self.parameters],
            "memory_bytes": self.memory and self.memory._asdict(),
        }

    def table(self) -> TextTable:
        """Return a table that `print` and Rich's consoles fit to their width."""
        return _table(self)


def _table(summary: Summary) -> TextTable:
    """Return a row for each layer, followed by a row for each of its parameters."""
    places = {place.name: place for place in summary.parameters}
    rows, styles = [], []
    for layer in summary.layers:
        trained = [places[name] for name in layer.parameters if name in places]
        rows += [_layer_row(layer, trained), *map(_parameter_row, trained)]
        styles += ["bold" if trained else "", *[""] * len(trained)]
    names = [TextColumn("layer", right=False), TextColumn("shape", right=False)]
    figures = map(TextColumn, ("params", "MFLOP", "+backward", "bucket", "ready"))
    return TextTable(
        [*names, *figures], rows, title="Model", note=_note(summary), dropped_first=_DROPPED_FIRST, styles=styles
    )


def _layer_row(layer: Layer, trained: Sequence[ParameterPlace]) -> tuple[str, ...]:
    name = " ".join(part for part in (layer.name, layer.kind) if part)
    count = f"{sum(place.size for place in trained):,}" if trained else ""
    flops = _millions(layer.forward_flops), _millions(layer.training_flops)
    return name, _shape(layer.output_shape), count, *flops, "", ""


def _parameter_row(place: ParameterPlace) -> tuple[str, ...]:
    own = place.name.rpartition(".")[2]
    return f"  {own}", _shape(place.shape), f"{place.size:,}", "", "", _buckets(place), str(place.ready)


def _note(summary: Summary) -> str:
    forward, training = summary.flops(training=False), summary.flops(training=True)
    text = f"{summary.parameter_count:,} trained parameters{_memory(summary.memory)}"
    if forward is None or training is None:
        return f"{text}\nlayers' shapes and MFLOP are known for clcomm's and PyTorch's models only"
    return f"{text}\n{forward / 1e6:,.2f} MFLOP a sample, {training / 1e6:,.2f} with backward"


def _memory(use: MemoryUse | None) -> str:
    if use is None:
        return ""
    parts = {"parameters": use.parameters, "gradients": use.gradients, "optimizer state": use.optimizer_state}
    parts |= {"in flight": use.in_flight} if use.in_flight else {}
    return "\na rank has " + ", ".join(f"{format_size(nbytes)} of {name}" for name, nbytes in parts.items()).replace(
        "of in flight", "in flight"
    )


def _shape(shape: Sequence[int] | None) -> str:
    return "" if shape is None else " x ".join(map(str, shape))


def _millions(flops: int | None) -> str:
    return f"{flops / 1e6:,.3f}" if flops else ""


def _buckets(place: ParameterPlace) -> str:
    if not place.buckets:
        return ""
    first, last = min(place.buckets), max(place.buckets)
    return str(first) if first == last else f"{first}-{last}"
