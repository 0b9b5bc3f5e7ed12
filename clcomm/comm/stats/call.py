"""One rank's call of a collective: how it is counted, and what has to be equal on every rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np

from clcomm.base.errors import MismatchError, name_ranks
from clcomm.base.host.bfloat16 import dtype_name

#: How many arrays' shapes messages list.
_MOST_SHAPES = 4


@dataclass(frozen=True)
class Call:
    """One rank's call of a collective; the same object is used for all calls with equal arguments."""

    operation: str
    label: str
    #: Name of the transport that moves the data.
    transport: str
    #: Its size for the stats, in bytes, without padding; ranks compare it where they compare `count`.
    nbytes: int = 0
    #: Whether MPI moves the data, which compares nothing; the ranks then meet before the call.
    through_mpi: bool = False
    #: The reduction, such as "sum".
    op: str = ""
    #: Number of the array's elements, -1 where ranks may differ in it, and their dtype.
    count: int = -1
    dtype: np.dtype | None = None
    #: The array's shape, unless it has one dimension or ranks may differ in it.
    shape: tuple[int, ...] | None = None
    bucket: int = -1
    #: -1: no root.
    root: int = -1
    #: Number of a prepared operation; 0: not prepared.
    prepared: int = 0
    #: Whether it has a sequence number of its own; ranks compare arguments in collectives that have none.
    is_counted: bool = True
    #: The rank without whose message it does not end; -1: of all, which have to come to it.
    peer: int = -1
    #: Whether it ends by a message of any rank.
    takes_any: bool = False
    #: What ranks compare, in place of label and bucket, which may then differ; None: these.
    compared: str | None = None
    #: Whether its arrays are aligned to their dtype.
    is_aligned: bool = True

    @cached_property
    def extent(self) -> tuple[int, ...] | None:
        """The array's shape; None where ranks may differ in it, or there is none."""
        return self.shape if self.shape is not None or self.count < 0 else (self.count,)

    @cached_property
    def dtype_name(self) -> str:
        """The dtype's name; "": none."""
        return "" if self.dtype is None else dtype_name(self.dtype)

    @cached_property
    def tag(self) -> int:
        """A 62-bit hash, equal on two ranks whose calls match."""
        alike: tuple[object, ...]
        if self.compared is None:
            alike = self.operation, self.label, self.transport, self.op, self.count, str(self.dtype), self.bucket
        else:
            alike = self.operation, self.compared, self.transport, self.op, self.count, str(self.dtype)
        nbytes = self.nbytes if self.count >= 0 else 0
        text = repr((*alike, nbytes, self.shape, self.root, self.prepared, self.is_aligned))
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 2

    def misses(self, left: Mapping[int, int], ranks: int, sequence: int) -> int | None:
        """Return the rank for which this call waits in vain, None if it may end.

        Args:
            left: the ranks that have left the program, and after how many collectives each.
            ranks: the number of all ranks, the caller included.
            sequence: of this call; for one without a number that of the collective before it.
        """
        if self.takes_any:
            return min(left) if 0 < len(left) == ranks - 1 else None
        if self.peer >= 0:
            return self.peer if self.peer in left else None
        before = sequence + (not self.is_counted)
        return min((rank for rank, done in left.items() if done < before), default=None)

    def describe(self, sequence: int) -> str:
        """Return the call in words, e.g. "all_reduce 'gradients' #12 (sum of 1,000 float32, bucket 3)"."""
        name = f"{self.operation} {self.label!r}" if self.label else self.operation
        details = []
        if self.dtype is not None:
            misaligned = "" if self.is_aligned else "misaligned "
            count = "" if self.count < 0 else f"{self.count:,} "  # that of an all-to-all may differ between ranks
            details.append(f"{self.op + ' of ' if self.op else ''}{count}{misaligned}{dtype_name(self.dtype)}")
        if self.shape is not None:
            details.append(f"shape {list(self.shape)}")
        if self.compared and self.dtype is not None and self.compared != dtype_name(self.dtype):
            details.append(f"from {self.compared}")
        if self.compared and self.dtype is not None and self.nbytes > self.count * self.dtype.itemsize:
            details.append(f"a piece of {self.nbytes:,} bytes")
        if self.dtype is not None and 0 < self.nbytes < self.count * self.dtype.itemsize:
            details.append(f"{self.nbytes:,} bytes without padding")
        if self.bucket >= 0:
            details.append(f"bucket {self.bucket}")
        if self.root >= 0:
            details.append(f"root {self.root}")
        if self.prepared:
            details.append(f"prepared as number {self.prepared}")
        if self.through_mpi and self.dtype is not None:
            details.append("through MPI")
        if self.transport == "staged":
            details.append("in other memory")
        return f"{name}{'' if self.is_counted else ' after'} #{sequence}" + (
            f" ({', '.join(details)})" if details else ""
        )


def describe_shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    """Return the shapes of arrays that are reduced together, those beyond a few as a checksum."""
    text = ", ".join(str(list(shape)) for shape in shapes[:_MOST_SHAPES])
    if len(shapes) > _MOST_SHAPES:
        text += f" and {len(shapes) - _MOST_SHAPES} more with checksum {zlib.crc32(repr(shapes).encode()):08x}"
    return text


def disagreement(descriptions: Sequence[str], name_of: Callable[[Sequence[int]], str] = name_ranks) -> MismatchError:
    """Return the error for ranks that are in different collectives; descriptions: by rank."""
    sides: dict[str, list[int]] = {}
    for rank, text in enumerate(descriptions):
        sides.setdefault(text, []).append(rank)
    found = "; ".join(f"{name_of(ranks)} in {text}" for text, ranks in sides.items())
    return MismatchError(
        f"collective: expected the same one with equal arrays on every rank, got {found}; "
        f"call the same collectives in the same order"
    )
