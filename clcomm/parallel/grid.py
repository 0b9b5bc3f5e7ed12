"""The coordinates of a mesh's ranks, and a picture of them: arithmetic, without communication."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from numbers import Integral

import numpy as np

from clcomm.base.errors import ArgumentError

#: The name of the axis whose ranks exchange the most, within every layer; in any case of letters.
TENSOR_PARALLEL = "tp"
#: A size that stands for the rest of the other sizes.
REST = -1


def in_words(axes: Mapping[str, object]) -> str:
    """Return axes and sizes as "dp=2, tp=2"."""
    return ", ".join(f"{name}={size!r}" for name, size in axes.items()) or "none"


def checked_sizes(axes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the sizes of a mesh's axes; ArgumentError unless their product is the number of ranks."""
    given = in_words(axes)
    if not axes:
        raise ArgumentError(f"mesh: expected an axis such as dp={ranks}, got none")
    for name, size in axes.items():
        if not name.isidentifier():
            raise ArgumentError(f"mesh: expected names of letters, digits and _, got {name!r}")
        if isinstance(size, bool) or not isinstance(size, Integral) or (size < 1 and size != REST):
            raise ArgumentError(f"mesh: expected sizes from 1 up, or -1 for what remains, got {given}")
    sizes = {name: int(size) for name, size in axes.items()}
    open_axes = [name for name, size in sizes.items() if size == REST]
    if len(open_axes) > 1:
        raise ArgumentError(f"mesh: expected one size of -1 at most, got {given}")
    product = math.prod(size for size in sizes.values() if size != REST)
    if open_axes and ranks % product == 0:
        sizes[open_axes[0]] = ranks // product
    elif open_axes:
        raise ArgumentError(f"mesh: expected sizes that divide the number of ranks, got {given} for {ranks} ranks")
    elif product != ranks:
        raise ArgumentError(
            f"mesh: expected sizes with the number of ranks as their product, got {given}, which is {product}, for "
            f"{ranks} ranks; one size may be -1: what remains"
        )
    return sizes


def innermost(names: Sequence[str]) -> str:
    """Return the axis along which ranks share a host: the one named "tp", else the last."""
    return next((name for name in names if name.lower() == TENSOR_PARALLEL), names[-1])


def layout(sizes: Mapping[str, int], hosts: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the rank at each coordinate, in an array with an axis for each name.

    Ranks along the innermost axis share a host as far as the hosts' numbers of ranks allow; the other axes follow in
    the order given, the first slowest.

    Args:
        sizes: of the axes by name; their product is the number of ranks.
        hosts: the ranks of each host.
    """
    names, inner = list(sizes), innermost(list(sizes))
    size = sizes[inner]
    whole = [rank for host in hosts for rank in host[: len(host) // size * size]]
    left = [rank for host in hosts for rank in host[len(host) // size * size :]]
    outer = [name for name in names if name != inner]
    grid = np.array(whole + left).reshape([*(sizes[name] for name in outer), size])
    return np.moveaxis(grid, -1, names.index(inner))


def spread_groups(grid: np.ndarray, axis: int, host_of: Mapping[int, int]) -> int:
    """Return the number of groups of ranks along an axis that span several hosts."""
    groups = np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])
    return sum(len({host_of[rank] for rank in group}) > 1 for group in groups.tolist())


def picture(sizes: Mapping[str, int], grid: np.ndarray, host_of: Mapping[int, int]) -> str:
    """Return the mesh as text: a column for each coordinate of the innermost axis, a row for each of all others."""
    hosts = len(set(host_of.values()))
    cell = "rank@host" if hosts > 1 else "rank"
    title = f"mesh {' x '.join(f'{name}={size}' for name, size in sizes.items())}: {cell}"
    shown = [name for name, size in sizes.items() if size > 1] or list(sizes)[-1:]
    across = innermost(shown)
    down = [name for name in shown if name != across]
    ordered = np.transpose(grid, [list(sizes).index(name) for name in [*(set(sizes) - {*shown}), *down, across]])
    texts = [[f"{rank}@{host_of[rank]}" if hosts > 1 else str(rank) for rank in row]
             for row in ordered.reshape(-1, sizes[across]).tolist()]  # fmt: skip
    labels = [" ".join(f"{name} {at}" for name, at in zip(down, place, strict=True))
              for place in itertools.product(*(range(sizes[name]) for name in down))]  # fmt: skip
    heads = [f"{across} {at}" for at in range(sizes[across])]
    width, margin = max(map(len, [*heads, *itertools.chain(*texts)])), max(map(len, labels))
    lines = [("", heads), *zip(labels, texts, strict=True)]
    cells = [[f"{label:<{margin}}"] * bool(margin) + [f"{text:>{width}}" for text in row] for label, row in lines]
    return "\n".join([title, *("  ".join(row) for row in cells)])
