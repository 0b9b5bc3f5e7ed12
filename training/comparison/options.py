"""The options of a comparison: those of every training job, and what to compare."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from clcomm.base.errors import ArgumentError
from clcomm.insight.drawing.svg import require_svg
from training.option_fields import option_group
from training.options import JobOptions

#: What is compared with bucketed and per tensor by default.
DEFAULT_VARIANTS = ("64KiB", "64KiB+overlap", "256KiB", "auto", "bucketed+mpi", "tensor+mpi")
GRAMMAR = "bucketed, tensor, auto or a size such as 256KiB, and then, if wanted, +overlap, +shared or +mpi"


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise ArgumentTypeError(f"expected a list of texts, got {value!r}")


_comparison = option_group("comparison")


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(JobOptions):
    """The options of a comparison, such as `ComparisonOptions(model="mlp", variants=["64KiB", "auto"])`."""

    USUAL: ClassVar[tuple[str, ...]] = ("variants", "plot", *JobOptions.USUAL)

    variants: Sequence[str] | None = _comparison(
        None, f"compared with bucketed and per tensor: {GRAMMAR}; default: {' '.join(DEFAULT_VARIANTS)}", _texts,
        nargs="*", metavar="WAY",
    )  # fmt: skip
    plot: str | None = _comparison(None, "draw step time by bucket size", metavar="FILE.svg")

    def check(self) -> None:
        super().check()
        if self.zero_stage:
            raise ArgumentError(f"{self.sharded_by}: expected none in a comparison of buckets, as it has no buckets")
        require_svg("--plot", self.plot)
