"""The variants of a comparison: ways to synchronise gradients, by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.base.units import parse_size
from clcomm.comm.communicator import AUTO
from training.comparison.options import DEFAULT_VARIANTS, GRAMMAR, ComparisonOptions
from training.options import JobOptions, TrainingOptions
from training.result import PER_TENSOR

BUCKETED = "bucketed"
_TRANSPORTS = ("auto", "shared", "mpi")


@dataclass(frozen=True)
class Variant:
    """One way to synchronise: bucket size, transport, and whether it overlaps with backward.

    bucket_size: bytes; "auto": the fastest, found in the first steps; None: each tensor on its own.
    """

    name: str
    bucket_size: int | str | None
    transport: str
    overlap: bool = False

    def applied_to(self, options: ComparisonOptions) -> TrainingOptions:
        """Return the options of a run that synchronises this way."""
        common: dict[str, Any] = {each.name: getattr(options, each.name) for each in fields(JobOptions)}
        changed: dict[str, Any] = {
            "no_bucketing": self.bucket_size is None,
            "transport": self.transport,
            "overlap": "on" if self.overlap else "off",
        }
        if self.bucket_size is not None:
            changed["bucket_size"] = self.bucket_size
        if options.trace:
            changed["trace"] = self.file_of(options.trace)
        return TrainingOptions(**{**common, **changed})

    def file_of(self, path: str) -> str:
        """Return the name of this variant's file: run.json.gz becomes run.per-tensor+mpi.json.gz."""
        base = path.removesuffix(".gz").removesuffix(".json")
        ending = path[len(base) :]
        return f"{base}.{self.name.replace(', ', '+').replace(' ', '-')}{ending}"

    @property
    def way(self) -> tuple[object, ...]:
        """Everything but the name; variants that are equal in this are duplicates."""
        return self.bucket_size, self.transport, self.overlap


def variants_of(options: ComparisonOptions) -> list[Variant]:
    """Return bucketed as the options say, per tensor, and those that --variants names, without duplicates.

    Raises ArgumentError for a text that names no variant, and for overlap with --uneven-inputs join, which excludes it;
    the default variants are then those without overlap.
    """
    joins = options.uneven_inputs == "join"
    asked = options.variants
    if asked is None:
        asked = [text for text in DEFAULT_VARIANTS if not (joins and text.endswith("+overlap"))]
    texts: Iterable[str] = ["bucketed", "tensor", *asked]
    found: dict[tuple[object, ...], Variant] = {}
    for variant in (parse_variant(text, options) for text in texts):
        if variant.overlap and joins:
            raise ArgumentError(f"--variants: expected no overlap with --uneven-inputs join, got {variant.name!r}")
        found.setdefault(variant.way, variant)
    return list(found.values())


def parse_variant(text: str, options: ComparisonOptions) -> Variant:
    """Return the variant that a text such as "256KiB+mpi" names; the rest is as the options say.

    `--overlap auto` counts as off: it would change within the comparison.
    """
    what, *ways = text.split("+")
    transports = [way for way in ways if way in _TRANSPORTS]
    overlaps = ways.count("overlap")
    if len(transports) + overlaps < len(ways) or len(transports) > 1 or overlaps > 1:
        raise ArgumentError(f"--variants: expected {GRAMMAR}, got {text!r}")
    name = ", ".join([{"tensor": PER_TENSOR}.get(what, what), *ways])
    transport = transports[0] if transports else options.transport
    return Variant(name, _bucket_size(what, text, options), transport, bool(overlaps) or options.overlap == "on")


def _bucket_size(what: str, text: str, options: ComparisonOptions) -> int | str | None:
    if what == "tensor":
        return None
    if what == AUTO or (what == BUCKETED and options.bucket_size == AUTO):
        return AUTO
    if what == BUCKETED:
        return parse_size(options.bucket_size, "--bucket-size")
    try:
        return parse_size(what)
    except ArgumentError:
        raise ArgumentError(f"--variants: expected {GRAMMAR}, got {text!r}") from None
