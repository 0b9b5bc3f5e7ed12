"""A collective as its caller means it: what it is counted under, and what has to be the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np

from clcomm.errors import MismatchError
from clcomm.transport.bfloat16 import dtype_name


@dataclass(frozen=True)
class Call:
    """One rank's call of a collective; the same object serves each time it is called with equal arguments.

    nbytes: the size to count. transport: the name of the one that carries it. through_mpi: ranks meet before it, as
    it has no meeting of its own. count, dtype: the array's. root: -1 where there is none. prepared: the number of a
    prepared operation, 0 for others. is_counted: it has a sequence number of its own; else it is one by which ranks
    agree on something. is_aligned: its arrays start where a whole element may.
    """

    operation: str
    label: str
    transport: str
    nbytes: int = 0
    through_mpi: bool = False
    op: str = ""
    count: int = -1
    dtype: np.dtype | None = None
    bucket: int = -1
    root: int = -1
    prepared: int = 0
    is_counted: bool = True
    is_aligned: bool = True

    @cached_property
    def tag(self) -> int:
        """A number of 62 bits, the same on all ranks whose calls fit together, and on no others."""
        alike = (self.operation, self.label, self.transport, self.op, self.count, str(self.dtype), self.bucket)
        text = repr((*alike, self.root, self.prepared, self.is_aligned))
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 2

    def describe(self, sequence: int) -> str:
        """Return the call in words, e.g. "all_reduce 'gradients' #12 (sum of 1,000 float32, bucket 3)"."""
        name = f"{self.operation} {self.label!r}" if self.label else self.operation
        details = []
        if self.dtype is not None:
            misaligned = "" if self.is_aligned else "misaligned "
            details.append(f"{self.op + ' of ' if self.op else ''}{self.count:,} {misaligned}{dtype_name(self.dtype)}")
        if self.bucket >= 0:
            details.append(f"bucket {self.bucket}")
        if self.root >= 0:
            details.append(f"root {self.root}")
        if self.prepared:
            details.append(f"prepared as number {self.prepared}")
        if self.through_mpi and self.dtype is not None:
            details.append("through MPI")
        return f"{name}{'' if self.is_counted else ' after'} #{sequence}" + (
            f" ({', '.join(details)})" if details else ""
        )


def disagreement(descriptions: list[str]) -> MismatchError:
    """Return the error for ranks that are in different collectives, from what each one is in."""
    sides: dict[str, list[int]] = {}
    for rank, text in enumerate(descriptions):
        sides.setdefault(text, []).append(rank)
    told = "; ".join(f"{name_ranks(ranks)} in {text}" for text, ranks in sides.items())
    return MismatchError(
        f"collective: expected the same one with equal arrays on every rank, got {told}; "
        f"call the same collectives in the same order"
    )


def name_ranks(ranks: list[int], most: int = 8) -> str:
    """Return "rank 3", "ranks 0 and 2" or "ranks 0, 1, 2 and 30 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > most:
        return f"ranks {', '.join(map(str, ranks[:most]))} and {len(ranks) - most} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
