"""A model's summary as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clcomm.text_table import Column, TextTable

if TYPE_CHECKING:
    from clcomm.summary.parts import Layer, ParameterPlace, Summary

#: What goes first where there is too little room for all.
_DROPPED_FIRST = ("ready", "bucket", "+backward", "MFLOP", "shape")


def summary_table(summary: Summary) -> TextTable:
    """Return a row for each layer, and below it one for each of its parameters."""
    places = {place.name: place for place in summary.parameters}
    rows, styles = [], []
    for layer in summary.layers:
        trained = [places[name] for name in layer.parameters if name in places]
        rows += [_layer_row(layer, trained), *map(_parameter_row, trained)]
        styles += ["bold" if trained else "", *[""] * len(trained)]
    names = [Column("layer", right=False), Column("shape", right=False)]
    figures = map(Column, ("params", "MFLOP", "+backward", "bucket", "ready"))
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
    text = f"{summary.parameter_count:,} trained parameters"
    if forward is None or training is None:
        return f"{text}\nno shapes or MFLOP of layers: only clcomm's own and PyTorch's models tell them"
    return f"{text}\n{forward / 1e6:,.2f} MFLOP a sample, {training / 1e6:,.2f} with backward"


def _shape(shape: Sequence[int] | None) -> str:
    return "" if shape is None else " x ".join(map(str, shape))


def _millions(flops: int | None) -> str:
    return f"{flops / 1e6:,.3f}" if flops else ""


def _buckets(place: ParameterPlace) -> str:
    if not place.buckets:
        return ""
    first, last = min(place.buckets), max(place.buckets)
    return str(first) if first == last else f"{first}-{last}"
