"""The output of `clcomm tune`: the fits, the bucket sizes, and the predicted times of larger jobs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clcomm.base.console.output import make_console
from clcomm.base.console.table import TextColumn, TextTable
from clcomm.base.units import format_size
from clcomm.comm.costs.costfile import SUMMED_BY
from clcomm.comm.costs.forecast import Candidate, Recommendation, ScalingRow, scaling
from clcomm.comm.costs.model import Cluster, MeasuredFit

_DOUBTFUL = 0.3  # median error from which a fit is unreliable


@dataclass(frozen=True)
class TuneResult:
    """The results, the same on every rank.

    `measured_s` are seconds of the recommended buckets by (ranks, hosts); `sums` is "device" or "numpy".
    """

    fits: tuple[MeasuredFit, ...]
    cluster: Cluster
    link_from: str
    tensors: tuple[int, ...]
    recommendation: Recommendation
    measured_s: dict[tuple[int, int], float]
    sums: str


def show(result: TuneResult, ranks_per_host: int, options: argparse.Namespace, stored: Path | None) -> None:
    """Print the results; stored: the file of the fits, None if they were not stored."""
    console = make_console(highlight=False)
    compute_s = (options.forward_ms + options.backward_ms) / 1e3
    name = options.model if options.bytes is None else "gradients"
    console.print(fits_table(result))
    console.print(f"sums in shared memory: by {SUMMED_BY[result.sums]}")
    doubtful = max(found.fit.median_error for found in result.fits)
    if doubtful > _DOUBTFUL:
        console.print(
            f"Half of the measured times differ from a fit by {doubtful:.0%} or more: were other programs running? "
            "Measure again with more --iterations."
        )
    console.print()
    what = f"{name}: {sum(result.tensors):,} bytes in {len(result.tensors)} tensors"
    console.print(candidates_table(result.recommendation, what))
    console.print(recommendation_line(result, compute_s))
    console.print()
    rows = scaling(
        result.cluster, result.recommendation.best.buckets, ranks_per_host=ranks_per_host,
        measured_s=result.measured_s, compute_s=compute_s or None,
    )  # fmt: skip
    console.print(scaling_table(rows, with_efficiency=compute_s > 0))
    console.print(f"network: a message's {link_text(result)}")
    if stored:
        console.print(f"stored in {stored}")


def fits_table(result: TuneResult) -> TextTable:
    """Return the fits: alpha in us, beta in ns a KiB, its inverse in GB/s, errors in percent."""
    rows = []
    for transport, ranks, hosts, fit, _ in result.fits:
        cost, sizes = fit.cost, [nbytes for nbytes, _ in fit.points]
        rows.append((
            transport, str(ranks), str(hosts), f"{cost.alpha_s * 1e6:.1f}", f"{cost.beta_s_per_byte * 1024e9:.1f}",
            _bandwidth(cost.beta_s_per_byte), f"{fit.median_error:.0%}", f"{fit.max_error:.0%}",
            f"{format_size(min(sizes))} to {format_size(max(sizes))}",
        ))  # fmt: skip
    return _table(
        "All-reduce: alpha + beta x bytes",
        ["transport", "ranks", "hosts", "alpha us", "beta ns/KiB", "1/beta GB/s", "median error", "max error", "sizes"],
        rows,
        ["sizes", "max error", "hosts", "1/beta GB/s", "median error"],
    )


def candidates_table(found: Recommendation, what: str) -> TextTable:
    """Return the compared bucket sizes."""
    rows = [
        (
            size_text(candidate), str(len(candidate.buckets)), format_size(max(candidate.buckets)),
            f"{candidate.seconds * 1e3:.3f}", "recommended" if candidate == found.best else "",
        )
        for candidate in found.candidates
    ]  # fmt: skip
    return _table(what, ["bucket size", "buckets", "largest", "predicted step ms", ""], rows, ["largest", "buckets"])


def recommendation_line(result: TuneResult, compute_s: float) -> str:
    """Return the recommendation with its predicted and measured time."""
    best = result.recommendation.best
    (ranks, hosts), seconds = max(result.measured_s.items())
    model = result.cluster
    predicted_s = sum(model.all_reduce_s(nbytes, ranks, hosts) for nbytes in best.buckets)
    basis = "" if compute_s else "; add --forward-ms, --backward-ms and --overlap to take computing into account"
    return (
        f"recommended: {size_text(best)}, {len(best.buckets)} a step: predicted {predicted_s * 1e3:.3f} ms, "
        f"measured {seconds * 1e3:.3f} ms on {ranks} ranks{basis}"
    )


def scaling_table(scaled: list[ScalingRow], *, with_efficiency: bool) -> TextTable:
    """Return the scaling table, with times of a step's all-reduces in ms."""
    headings = ["ranks", "hosts", "within ms", "between ms", "predicted ms", "measured ms", "busbw GB/s", "basis"]
    rows = []
    for row in scaled:
        measured = "" if row.measured_s is None else f"{row.measured_s * 1e3:.3f}"
        times = [f"{seconds * 1e3:.3f}" for seconds in (row.local_s, row.network_s, row.predicted_s)]
        efficiency = [] if row.efficiency is None else [f"{row.efficiency:.1%}"]
        figures = f"{row.busbw_bytes_per_s / 1e9:.2f}", row.basis, *efficiency
        rows.append((str(row.ranks), str(row.hosts), *times, measured, *figures))
    return _table(
        "Scaling: a step's all-reduces",
        headings + (["efficiency"] if with_efficiency else []),
        rows,
        ["busbw GB/s", "within ms", "between ms", "hosts", "basis", "measured ms"],
    )


def link_text(result: TuneResult) -> str:
    """Return the latency and bandwidth between hosts, and their source."""
    link = result.cluster.link
    text = f"{link.alpha_s * 1e6:.1f} us and {_bandwidth(link.beta_s_per_byte)} GB/s, {result.link_from}"
    if "one host" in result.link_from:
        text += "; with one host this is no network: give --link-us and --link-gb-s"
    return text


def size_text(candidate: Candidate) -> str:
    return "per tensor" if candidate.bucket_size is None else format_size(candidate.bucket_size)


def _bandwidth(beta_s_per_byte: float) -> str:
    return f"{1e-9 / beta_s_per_byte:.2f}" if beta_s_per_byte else "unbounded"


def _table(title: str, headings: list[str], rows: Sequence[tuple[str, ...]], dropped_first: list[str]) -> TextTable:
    columns = [TextColumn(each, right=each not in ("transport", "bucket size", "basis", "")) for each in headings]
    return TextTable(columns, rows, title=title, dropped_first=dropped_first)
