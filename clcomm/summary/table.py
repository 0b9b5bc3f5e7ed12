"""A model's summary as a table of at most 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from clcomm.summary.parts import ParameterPlace, Summary

_LONGEST_NAME = 24


def summary_table(summary: Summary) -> Table:
    """Return a row for each layer, and below it one for each of its parameters."""
    table = Table(
        title="Model", title_justify="left", box=None, header_style="bold", pad_edge=False, collapse_padding=True,
        caption=_caption(summary), caption_justify="left",
    )  # fmt: skip
    table.add_column("layer", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    for heading in ("params", "MFLOP", "+backward", "bucket", "ready"):
        table.add_column(heading, justify="right", no_wrap=True)
    places = {place.name: place for place in summary.parameters}
    for layer in summary.layers:
        trained = [places[name] for name in layer.parameters if name in places]
        name = _shortened(" ".join(part for part in (layer.name, layer.kind) if part))
        count = f"{sum(place.size for place in trained):,}" if trained else ""
        table.add_row(
            name, _shape(layer.output_shape), count, _millions(layer.forward_flops), _millions(layer.training_flops),
            style="bold" if trained else None,
        )  # fmt: skip
        for place in trained:
            own = place.name.rpartition(".")[2]
            table.add_row(
                _shortened(f"  {own}"),
                _shape(place.shape),
                f"{place.size:,}",
                "",
                "",
                _buckets(place),
                str(place.ready),
            )
    return table


def _caption(summary: Summary) -> str:
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


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
