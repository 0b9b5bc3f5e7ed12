"""The mesh: a Communicator's ranks laid out along named axes, with a Communicator for each."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from functools import cache
from numbers import Integral
from types import NoneType
from typing import Any, NoReturn

import numpy as np

from clcomm.base.errors import ArgumentError, no_copy
from clcomm.comm.communicator import Communicator
from clcomm.comm.transport.hosts import Hosts
from clcomm.sync.agreement import require_agreement

#: The label under which the Communicator's stats count a mesh's comparisons.
MESH = "mesh"
_log = logging.getLogger("clcomm")


class Mesh:
    """Ranks along named axes: `Mesh(comm, dp=2, tp=2)["dp"]` is a Communicator of this rank's data-parallel peers.

    Creating one is collective. Ranks along "tp", or without such an axis along the last one, share a host as far as the
    hosts' numbers of ranks allow, since tensor-parallel peers exchange the most. A rank's number in an axis's
    Communicator is its coordinate. The Communicators have `comm`'s settings, shared memory of their own where their
    ranks share a host, and the axis's name in stats, timelines and messages; `comm`'s observers see their events too,
    as those of a part of it. They are closed with `comm`. All groups along an axis sum in the same order, so that what
    is the same on ranks of several groups stays so to the bit: if their ranks lie on the hosts in different ways,
    groups on several hosts sum in rank order, through MPI.

    Args:
        comm: the ranks.
        axes: the size of each axis; their product is the number of ranks, and one may be -1: the rest.

    Attributes:
        shape: the axes' sizes by name, in the order given.
        coordinates: this rank's, by axis.
        ranks: the rank in `comm` at each coordinate, with an axis of the array for each of the mesh.

    Raises:
        ArgumentError: sizes that are invalid or do not multiply to the number of ranks; on every rank.
        MismatchError: ranks differ in the axes; on every rank.
        ResourceError: MPI has no communicators left.
    """

    comm: Communicator
    shape: dict[str, int]
    coordinates: dict[str, int]
    ranks: np.ndarray

    def __init__(self, comm: Communicator, /, **axes: int):
        hosts = _agreed_hosts(comm, in_words(axes))
        sizes = checked_sizes(axes, comm.size)
        self._open(comm, sizes, layout(sizes, hosts), hosts)

    def _open(
        self, comm: Communicator, sizes: dict[str, int], grid: np.ndarray, hosts: Sequence[Sequence[int]]
    ) -> None:
        self.comm, self.shape, self.ranks = comm, sizes, grid
        place = [int(at) for at in np.argwhere(grid == comm.rank)[0]]
        self.coordinates = dict(zip(sizes, place, strict=True))
        self._host_of = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
        self._axes = {name: self._split(number, name) for number, name in enumerate(sizes)}
        inner = innermost(list(sizes))
        spread = spread_groups(grid, list(sizes).index(inner), self._host_of)
        if spread and comm.rank == 0:
            _log.warning(
                "mesh: %d of %d groups along %s have ranks on several hosts, through whose network they exchange; "
                "a size of %s that divides each host's number of ranks keeps them together",
                spread, grid.size // sizes[inner], inner, inner,
            )  # fmt: skip

    def _split(self, number: int, name: str) -> Communicator:
        """Return the Communicator of this rank's group along an axis; collective."""
        groups = np.moveaxis(self.ranks, number, -1).reshape(-1, self.ranks.shape[number])
        group, position = (int(at) for at in np.argwhere(groups == self.comm.rank)[0])
        hosts = [Hosts.of_names([self._host_of[rank] for rank in each]) for each in groups.tolist()]
        are_alike = len({each.ranks if each.nested else () for each in hosts}) == 1
        in_rank_order = not are_alike and hosts[group].nested
        part = self.comm.split(group, position, name=name, transport="mpi" if in_rank_order else None)
        assert part is not None
        return part

    def __reduce__(self) -> NoReturn:
        raise no_copy("Mesh", "make another where one is needed")

    def __getitem__(self, name: str) -> Communicator:
        """Return the Communicator of this rank's group along an axis; ArgumentError for an unknown name."""
        self._require_names([name])
        return self._axes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._axes

    def rank_at(self, **coordinates: int) -> int:
        """Return the rank in `comm` at these coordinates; of axes that are not given, at this rank's."""
        self._require_names(coordinates)
        for name, at in coordinates.items():
            if not 0 <= at < self.shape[name]:
                raise ArgumentError(f"{name}: expected a coordinate from 0 to {self.shape[name] - 1}, got {at!r}")
        return int(self.ranks[tuple((self.coordinates | coordinates).values())])

    def shift(self, name: str, by: int = 1, *, periodic: bool = False) -> tuple[int | None, int | None]:
        """Return the ranks in `comm` that are `by` before and after this one along an axis: source and dest.

        Like MPI_Cart_shift (MPI 4.1, section 8.5.6): for the exchange of halos with `comm.sendrecv`. Beyond an edge
        there is None, nobody, unless `periodic`: the last rank then is before the first.
        """
        self._require_names([name])
        at, size = self.coordinates[name], self.shape[name]
        before, after = (place % size if periodic or 0 <= place < size else None for place in (at - by, at + by))
        source, dest = (None if place is None else self.rank_at(**{name: place}) for place in (before, after))
        return source, dest

    def _require_names(self, names: Any) -> None:
        unknown = next((name for name in names if name not in self.shape), None)
        if unknown is not None:
            raise ArgumentError(f"mesh: expected one of its axes {', '.join(self.shape)}, got {unknown!r}")

    def close(self) -> None:
        """Close the axes' Communicators; collective, and a second call does nothing. `comm` stays open."""
        for part in self._axes.values():
            part.finalize()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.shape.items())})"

    def __str__(self) -> str:
        return picture(self.shape, self.ranks, self._host_of)


class DeviceMesh(Mesh):
    """A Mesh whose ranks are given one by one, with the names of veScale's and PyTorch's DeviceMesh.

    `DeviceMesh("cuda", [[0, 1], [2, 3]], mesh_dim_names=("DP", "TP"))`; the device type may be left out, as each rank
    has a device of its own.

    Args:
        device_type: has no effect, which rank 0 logs once; or `mesh`, if that is left out.
        mesh: the rank at each coordinate, each rank once.
        mesh_dim_names: the axes, one for each dimension of `mesh`.
        comm: the ranks; None: all of the job.

    Raises:
        ArgumentError: not each rank once, or not a name for each dimension; on every rank.
        MismatchError: ranks differ in an argument; on every rank.
    """

    def __init__(
        self,
        device_type: object = None,
        mesh: object = None,
        *,
        mesh_dim_names: Sequence[str],
        comm: Communicator | None = None,
    ):
        comm = Communicator() if comm is None else comm
        if mesh is None:
            mesh = device_type
        elif not isinstance(device_type, (str, NoneType)):
            raise ArgumentError(f"device_type: expected a word such as 'cuda', got {device_type!r}")
        elif device_type and comm.rank == 0:
            _say_type_is_unused(device_type)
        grid, names = np.array(mesh), [str(name) for name in mesh_dim_names]
        hosts = _agreed_hosts(comm, f"{grid.tolist()} with the names {', '.join(names)}")
        if grid.ndim != len(names) or len(set(names)) < len(names):
            raise ArgumentError(
                f"mesh_dim_names: expected a name for each of {grid.ndim} dimensions, got {', '.join(names) or 'none'}"
            )
        if sorted(grid.reshape(-1).tolist()) != list(range(comm.size)):
            raise ArgumentError(f"mesh: expected each of {comm.size} ranks once, got {grid.tolist()}")
        self._open(comm, checked_sizes(dict(zip(names, grid.shape, strict=True)), comm.size), grid, hosts)


@cache
def _say_type_is_unused(device_type: str) -> None:
    """Log once in a process that a DeviceMesh does not choose devices."""
    _log.warning(
        "DeviceMesh: device type %r changes nothing, as each rank computes on its own device, which --device or "
        "CLCOMM_DEVICE chooses",
        device_type,
    )


def _agreed_hosts(comm: Communicator, wanted: str) -> Sequence[Sequence[int]]:
    """Return the ranks of each host; MismatchError on every rank where they want different meshes. Collective."""
    require_communicator(comm)
    require_agreement(comm, "mesh", [wanted], "give every rank the same axes", label=MESH)
    return Hosts.of_names(comm.all_gather_object(comm.host, label=MESH)).ranks


def require_communicator(comm: object, example: str = "") -> None:
    """Raise ArgumentError for anything but a Communicator; example: one that fits."""
    if not isinstance(comm, Communicator):
        such = f", such as {example}," if example else ","
        raise ArgumentError(f"comm: expected a Communicator{such} got {type(comm).__name__}")


def ranks_along(comm: Communicator | Mesh, axis: str, *, else_first: bool = False) -> Communicator:
    """Return the ranks along a mesh's axis, in any case of letters, or a Communicator as it is.

    else_first: take a mesh's first axis if it has none of this name. Raises ArgumentError where there are no ranks.
    """
    if isinstance(comm, Mesh):
        names = [name for name in comm.shape if name.lower() == axis] or list(comm.shape)[:else_first]
        if not names:
            raise ArgumentError(f"comm: expected a Mesh with an axis {axis}, got the axes {', '.join(comm.shape)}")
        return comm[names[0]]
    if not isinstance(comm, Communicator):
        raise ArgumentError(f"comm: expected a Communicator or a Mesh, got {type(comm).__name__}")
    return comm


# --- The coordinates of a mesh's ranks, and a picture of them: arithmetic, without communication. ---

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
