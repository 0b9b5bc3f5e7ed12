"""The blocks in which a GPU's work-groups compute matrix products."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

Grid = tuple[tuple[int, int], tuple[int, int]]


class ProductBlock(NamedTuple):
    """The tile of a GPU's work-group of SIDE x SIDE items: EACH x EACH sums per item, SLICE terms at a time."""

    SIDE: int
    EACH: int
    SLICE: int

    @property
    def width(self) -> int:
        """Rows and columns of C that a group computes."""
        return self.SIDE * self.EACH

    @property
    def local_bytes(self) -> int:
        """Local memory of a group: two slices of both operands, whose rows are padded by four floats."""
        return 2 * 2 * self.SLICE * 4 * (self.width + 4)

    def grid(self, rows: int, columns: int) -> Grid:
        return (-(-columns // self.width) * self.SIDE, -(-rows // self.width) * self.SIDE), (self.SIDE, self.SIDE)


_SMALLER_BLOCKS = (ProductBlock(16, 4, 16), ProductBlock(8, 8, 8), ProductBlock(8, 4, 16))


@lru_cache(maxsize=1024)
def chosen_block(
    tuned: tuple[int, int, int], units: int, limits: tuple[int, int], rows: int, columns: int, count: int = 1
) -> ProductBlock:
    """Return the largest block, from the tuned one down, with which every compute unit has a group.

    `count` is the number of products in one launch.
    """
    largest = ProductBlock(*tuned)
    for block in (largest, *(block for block in _SMALLER_BLOCKS if block.width <= largest.width)):
        fits = limits[0] >= block.SIDE**2 and block.local_bytes <= limits[1]
        if fits and count * -(-rows // block.width) * -(-columns // block.width) >= units:
            return block
    return _SMALLER_BLOCKS[-1]
