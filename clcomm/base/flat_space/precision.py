"""The precisions in which parameters are stored; kernels compute in float32, and gradients are float32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clcomm.base.errors import ArgumentError


@dataclass(frozen=True)
class Precision:
    """A format of stored parameters: its name, and bytes of an element."""

    name: str
    itemsize: int

    @property
    def is_full(self) -> bool:
        """Whether it is float32, in which kernels read parameters as they are."""
        return self.itemsize == 4

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which the stored bits are moved."""
        return np.dtype(np.float32 if self.is_full else np.uint16)

    def nbytes(self, nbytes: int) -> int:
        """Return the bytes that take `nbytes` as float32; so do offsets in the flat space."""
        return nbytes * self.itemsize // 4

    def __reduce__(self) -> tuple[object, ...]:
        return parse_precision, (self.name,)  # copies are the precision itself

    def __str__(self) -> str:
        return self.name


FLOAT32, BF16, FP16 = Precision("float32", 4), Precision("bf16", 2), Precision("fp16", 2)
#: The names of all precisions.
PRECISIONS = {each.name: each for each in (FLOAT32, BF16, FP16)}


def parse_precision(value: Precision | str) -> Precision:
    """Return the precision of a name; ArgumentError for another name."""
    found = PRECISIONS.get(str(value))
    if found is None:
        raise ArgumentError(f"precision: expected one of {', '.join(PRECISIONS)}, got {value!r}")
    return found
