"""The ways to synchronise gradients that a comparison sets side by side, by name."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass

from clcomm.communicator import AUTO
from clcomm.errors import ArgumentError
from clcomm.units import parse_size

BUCKETED, PER_TENSOR = "bucketed", "per tensor"
_TRANSPORTS = ("auto", "shared", "mpi")
#: What is compared beside bucketed and per tensor unless one says otherwise.
DEFAULTS = ("64KiB", "64KiB+overlap", "256KiB", "auto", "bucketed+mpi", "tensor+mpi")
GRAMMAR = "bucketed, tensor, auto or a size such as 256KiB, and then, if wanted, +overlap, +shared or +mpi"


@dataclass(frozen=True)
class Variant:
    """One way to synchronise: what is reduced at a time, how it travels, and whether while backward goes on.

    bucket_size: bytes; "auto": what turns out to be the fastest; None: each tensor on its own.
    """

    name: str
    bucket_size: int | str | None
    transport: str
    overlap: bool = False

    def applied_to(self, options: Namespace) -> Namespace:
        """Return the options of a run that synchronises this way."""
        changed: dict[str, object] = {
            "no_bucketing": self.bucket_size is None,
            "transport": self.transport,
            "overlap": "on" if self.overlap else "off",
        }
        if self.bucket_size is not None:
            changed["bucket_size"] = self.bucket_size
        if getattr(options, "trace", None):
            changed["trace"] = self.file_of(options.trace)
        return Namespace(**{**vars(options), **changed})

    def file_of(self, path: str) -> str:
        """Return the name of this variant's own file: run.json.gz becomes run.per-tensor+mpi.json.gz."""
        base = path.removesuffix(".gz").removesuffix(".json")
        ending = path[len(base) :]
        return f"{base}.{self.name.replace(', ', '+').replace(' ', '-')}{ending}"

    @property
    def way(self) -> tuple[object, ...]:
        """All but the name: what makes two variants the same."""
        return self.bucket_size, self.transport, self.overlap


def variants_of(options: Namespace) -> list[Variant]:
    """Return bucketed as the options say, per tensor, and what --variants names, each way once.

    Raises ArgumentError for a text that names no variant, and for overlap with --uneven-inputs join, which rules it
    out; the default variants are those without it then.
    """
    joins = getattr(options, "uneven_inputs", None) == "join"
    asked = options.variants
    if asked is None:
        asked = [text for text in DEFAULTS if not (joins and text.endswith("+overlap"))]
    texts: Iterable[str] = ["bucketed", "tensor", *asked]
    found: dict[tuple[object, ...], Variant] = {}
    for variant in (parse_variant(text, options) for text in texts):
        if variant.overlap and joins:
            raise ArgumentError(f"--variants: expected no overlap with --uneven-inputs join, got {variant.name!r}")
        found.setdefault(variant.way, variant)
    return list(found.values())


def parse_variant(text: str, options: Namespace) -> Variant:
    """Return the variant that a text such as "256KiB+mpi" names; what it leaves open is as the options say.

    Only overlap that is left to be tried out is none: it would change in the middle of the comparison.
    """
    what, *ways = text.split("+")
    transports = [way for way in ways if way in _TRANSPORTS]
    overlaps = ways.count("overlap")
    if len(transports) + overlaps < len(ways) or len(transports) > 1 or overlaps > 1:
        raise ArgumentError(f"--variants: expected {GRAMMAR}, got {text!r}")
    name = ", ".join([{"tensor": PER_TENSOR}.get(what, what), *ways])
    transport = transports[0] if transports else options.transport
    return Variant(name, _bucket_size(what, text, options), transport, bool(overlaps) or options.overlap == "on")


def _bucket_size(what: str, text: str, options: Namespace) -> int | str | None:
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
