"""What `clcomm tune` prints: the fits, the bucket sizes, and how a job of more ranks would fare."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from clcomm.forecast import Candidate, ScalingRow, scaling
from clcomm.sums import SUMS
from clcomm.units import format_size

if TYPE_CHECKING:
    from clcomm.tune import Result

_FILE_WIDTH = 130  # mpiexec passes lines on: there is no terminal to fit into
_DOUBTFUL = 0.3  # median error of a fit from which on it is not to be relied on


def show(result: Result, ranks_per_host: int, options: argparse.Namespace, stored: Path | None) -> None:
    """Print everything."""
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)
    compute_s = (options.forward_ms + options.backward_ms) / 1e3
    name = options.model if options.bytes is None else "gradients"
    console.print(fits_table(result))
    console.print(f"sums in shared memory: by {SUMS[result.sums]}")
    doubtful = max(found.fit.median_error for found in result.fits)
    if doubtful > _DOUBTFUL:
        console.print(
            f"Half of the measured times are off a fit by {doubtful:.0%} or more: were other programs running? "
            "Measure again, with more --iterations."
        )
    console.print()
    console.print(candidates_table(result, f"{name}: {sum(result.tensors):,} bytes in {len(result.tensors)} tensors"))
    console.print(recommendation_line(result, compute_s))
    console.print()
    rows = scaling(
        result.cluster, result.recommendation.best.buckets, ranks_per_host=ranks_per_host,
        measured_s=result.measured_s, compute_s=compute_s or None,
    )  # fmt: skip
    console.print(scaling_table(rows, with_efficiency=compute_s > 0))
    console.print(f"network: a message's {link_text(result)}")
    if stored:
        console.print(f"kept in {stored}")


def fits_table(result: Result) -> Table:
    """Return the fits: alpha in us, beta in ns a KiB, its inverse in GB/s, errors in percent."""
    table = _table(
        "All-reduce: alpha + beta x bytes",
        ["transport", "ranks", "hosts", "alpha us", "beta ns/KiB", "1/beta GB/s", "median error", "max error", "sizes"],
    )
    for transport, ranks, hosts, fit, _ in result.fits:
        cost, sizes = fit.cost, [nbytes for nbytes, _ in fit.points]
        table.add_row(
            transport, str(ranks), str(hosts), f"{cost.alpha_s * 1e6:.1f}", f"{cost.beta_s_per_byte * 1024e9:.1f}",
            _bandwidth(cost.beta_s_per_byte), f"{fit.median_error:.0%}", f"{fit.max_error:.0%}",
            f"{format_size(min(sizes))} to {format_size(max(sizes))}",
        )  # fmt: skip
    return table


def candidates_table(result: Result, what: str) -> Table:
    """Return the bucket sizes that were weighed."""
    table = _table(what, ["bucket size", "buckets", "largest", "predicted step ms", ""])
    for candidate in result.recommendation.candidates:
        chosen = "recommended" if candidate == result.recommendation.best else ""
        largest = format_size(max(candidate.buckets))
        table.add_row(
            size_text(candidate), str(len(candidate.buckets)), largest, f"{candidate.seconds * 1e3:.3f}", chosen
        )
    return table


def recommendation_line(result: Result, compute_s: float) -> str:
    """Return the recommendation in a sentence, with what it rests on."""
    best = result.recommendation.best
    (ranks, hosts), seconds = max(result.measured_s.items())
    model = result.cluster
    predicted_s = sum(model.all_reduce_s(nbytes, ranks, hosts) for nbytes in best.buckets)
    basis = "" if compute_s else "; --forward-ms, --backward-ms and --overlap would take computing into account"
    return (
        f"recommended: {size_text(best)}, {len(best.buckets)} a step: predicted {predicted_s * 1e3:.3f} ms, "
        f"measured {seconds * 1e3:.3f} ms on {ranks} ranks{basis}"
    )


def scaling_table(rows: list[ScalingRow], *, with_efficiency: bool) -> Table:
    """Return the scaling table; times are of a step's all-reduces, in ms."""
    headings = ["ranks", "hosts", "within ms", "between ms", "predicted ms", "measured ms", "busbw GB/s", "basis"]
    table = _table("Scaling: a step's all-reduces", headings + (["efficiency"] if with_efficiency else []))
    for row in rows:
        measured = "" if row.measured_s is None else f"{row.measured_s * 1e3:.3f}"
        times = [f"{seconds * 1e3:.3f}" for seconds in (row.local_s, row.network_s, row.predicted_s)]
        efficiency = [] if row.efficiency is None else [f"{row.efficiency:.1%}"]
        table.add_row(
            str(row.ranks), str(row.hosts), *times, measured, f"{row.busbw_bytes_per_s / 1e9:.2f}", row.basis,
            *efficiency,
        )  # fmt: skip
    return table


def link_text(result: Result) -> str:
    """Return the link between hosts and where it comes from."""
    link = result.cluster.link
    text = f"{link.alpha_s * 1e6:.1f} us and {_bandwidth(link.beta_s_per_byte)} GB/s, {result.link_from}"
    if "one host" in result.link_from:
        text += ": a stand-in, as no second host took part; --link-us and --link-gb-s say better"
    return text


def size_text(candidate: Candidate) -> str:
    """Return a bucket size in words."""
    return "per tensor" if candidate.bucket_size is None else format_size(candidate.bucket_size)


def _bandwidth(beta_s_per_byte: float) -> str:
    return f"{1e-9 / beta_s_per_byte:.2f}" if beta_s_per_byte else "unbounded"


def _table(title: str, headings: list[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        left = heading in ("transport", "bucket size", "basis", "")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    return table
