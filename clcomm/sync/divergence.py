"""Replicas that differ: found by a hash, reported by parameter and rank, and made alike again if asked."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from clcomm.base.errors import DivergenceError, MismatchError, NonFiniteError, name_ranks
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import ParameterRange
from clcomm.base.host.arrays import WORD, hash_words
from clcomm.comm.communicator import Communicator
from clcomm.sync.agreement import CHECKS, all_alike
from clcomm.sync.shared_space import SharedSpace

ON_DIVERGENCE = ("raise", "rebroadcast")
#: Ranks that compute with unlike libraries or devices compare their replicas after the first step, and so often.
_UNLIKE_EVERY = 100
_MOST_NAMED = 4
_log = logging.getLogger("clcomm")


class Divergence(NamedTuple):
    """Which parameters differ on which ranks, in words, and a rank of the majority."""

    text: str
    source: int


class ReplicaGuard:
    """Compares the replicas of a Synchronizer's models; where they differ it raises or rebroadcasts.

    every: number of synchronisations between comparisons; 0: only explicit ones. checks, divergences: counts for
    reports.
    """

    def __init__(self, comm: Communicator, every: int, on_divergence: str):
        self._comm, self.every, self.on_divergence = comm, every, on_divergence
        self.checks = self.divergences = 0
        self._optimizers: dict[int, Any] = {}
        self._warned = False

    def attach(self, model: object, optimizer: object) -> None:
        """Send a model's optimizer state along when its parameters are rebroadcast.

        Not for a sharded optimizer: each part of its state exists once.
        """
        if not getattr(optimizer, "is_sharded", False):
            self._optimizers[id(model)] = optimizer

    def require_alike(self, space: SharedSpace) -> None:
        """Raise DivergenceError on every rank where the replicas differ; collective."""
        _raise(self._find(space))

    def check_start(self, space: SharedSpace, broadcast: Callable[[int], None]) -> None:
        """Compare what the replicas start from, frozen parameters too; act like `check`, or name what was forgotten.

        MismatchError is raised on every rank where they differ: a restart fails in the same way.
        """
        found = self._find(space, with_frozen=True)
        if found is not None and self.on_divergence == "raise":
            raise MismatchError(f"{found.text}; call broadcast_parameters(model) before the first step")
        self._repair(space, found, broadcast)

    def check(
        self, space: SharedSpace, broadcast: Callable[[int], None], with_frozen: bool = False, with_state: bool = False,
        repairs: bool = False,
    ) -> None:  # fmt: skip
        """Compare the replicas; where they differ raise DivergenceError on every rank, or broadcast the majority's.

        Args:
            broadcast: sends one rank's parameters, given by its number, to all ranks, and compares them.
            with_frozen, with_state: compare frozen parameters, or the attached optimizer's state, too.
            repairs: broadcast in any case.
        """
        found = self._find(space, with_frozen, with_state)
        if self.on_divergence == "raise" and not repairs:
            _raise(found)
        else:
            self._repair(space, found, broadcast)

    def _repair(self, space: SharedSpace, found: Divergence | None, broadcast: Callable[[int], None]) -> None:
        if found is None:
            return
        if self._comm.rank == 0:
            level = logging.DEBUG if self._warned else logging.WARNING
            _log.log(level, "%s; all go on with rank %d's", found.text, found.source)
        self._warned = True
        broadcast(found.source)
        self._broadcast_optimizer(space, found.source)

    def _find(self, space: SharedSpace, with_frozen: bool = False, with_state: bool = False) -> Divergence | None:
        self.checks += 1
        besides = _hashes_of_frozen(space) if with_frozen and space.has_parameters else {}
        if with_state and id(space.model) in self._optimizers:
            besides |= _hashes_of_state(space, self._optimizers[id(space.model)])
        found = find_divergence(self._comm, space, on_device=self.every > 0 or with_state, besides=besides)
        self.divergences += found is not None
        return found

    def _broadcast_optimizer(self, space: SharedSpace, source: int) -> None:
        optimizer = self._optimizers.get(id(space.model))
        if optimizer is None or space.has_several_libraries:
            return
        state = optimizer.state_dict() if self._comm.rank == source else None
        state = self._comm.broadcast_object(state, source, label=CHECKS)
        optimizer.load_state_dict(state)


def _raise(found: Divergence | None) -> None:
    if found is not None:
        raise DivergenceError(f"{found.text}; broadcast the parameters again and look for the cause")


def find_divergence(
    comm: Communicator, space: SharedSpace, on_device: bool, besides: Mapping[str, int]
) -> Divergence | None:
    """Compare the replicas' parameters by the hashes of their bits; None where all are alike. Collective.

    Parameters of which each rank has a shard have no replicas.

    Args:
        on_device: hash on the device that holds them, where the library can; the first time builds a kernel.
        besides: this rank's hashes of what is compared too, by name.
    """
    if not space.has_parameters:
        return None
    own = (_hash_of(space, on_device) + sum(besides.values())) % 2**64
    hashes = comm.all_gather(np.array([own], np.uint64), label=CHECKS)[:, 0]
    if all_alike(hashes):
        return None
    space.adapter.pull_parameters()
    names = [place.name for place in space.layout.ranges]
    return find_differing(comm, dict(zip(names, _hashes_of_slots(space), strict=True)) | dict(besides), space.kinds)


def find_differing(comm: Communicator, hashes: Mapping[str, int], kinds: Sequence[str]) -> Divergence | None:
    """Compare what ranks name alike by this rank's hashes; None where all are alike. Collective.

    kinds: what each rank computes with; one for all of them where they have the same.
    """
    rows = comm.all_gather(np.array([*hashes.values()], np.uint64), label=CHECKS)
    if all_alike(rows):
        return None
    said = describe([*hashes], rows, comm.name_ranks) + said_kinds(comm, kinds)
    return Divergence(said, _majority(rows.sum(axis=1))[0])


def is_due(averaged: int, every: int, are_unlike: bool) -> bool:
    """Return whether replicas are to be compared when so many gradients were averaged.

    every: as asked; 0: not asked. are_unlike: whether ranks compute with several kinds of library or device.
    """
    every = every or (_UNLIKE_EVERY if are_unlike else 0)
    return (every > 0 and averaged % every == 0) or (are_unlike and averaged == 2)


def said_kinds(comm: Communicator, kinds: Sequence[str]) -> str:
    """Return in words what ranks compute with, one kind for each, where that differs."""
    ranks = {kind: [rank for rank, each in enumerate(kinds) if each == kind] for kind in kinds}
    said = " and ".join(f"{kind} on {comm.name_ranks(own)}" for kind, own in ranks.items())
    return f"; they compute with {said}, which may round differently" if len(kinds) > 1 else ""


def _hashes_of_frozen(space: SharedSpace) -> dict[str, int]:
    """Return the hash of each frozen parameter; forward may have changed the buffers already."""
    state, buffers = space.adapter.extra_state(), space.adapter.buffers()
    return hashes_of_arrays({name: state[name] for name in sorted(state.keys() - buffers.keys())})


def _hashes_of_state(space: SharedSpace, optimizer: Any) -> dict[str, int]:
    """Return the checksum of each parameter's part of an optimizer's state, and a hash of its other entries."""
    hashes: dict[str, int] = {}
    for name, value in optimizer.state_dict().items():
        array = np.asarray(value)
        if array.dtype == np.float32 and array.nbytes == space.layout.span:
            sums = space.layout.checksums(array.view(np.uint8))
            hashes |= {f"{parameter}: {name}": each for parameter, each in sums.items()}
        elif array.dtype != object:
            hashes |= hashes_of_arrays({f"optimizer: {name}": array})
    return hashes


def hashes_of_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return a hash of each array's bits, and of its name, of 64 bits."""
    digests = {
        name: hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=WORD, key=name.encode()[:64])
        for name, array in arrays.items()
    }
    return {name: int.from_bytes(digest.digest(), "little") for name, digest in digests.items()}


def _hash_of(space: SharedSpace, on_device: bool) -> int:
    hash_there = getattr(space.adapter, "hash_parameters", None)
    if on_device and hash_there is not None:
        return int(hash_there())
    space.adapter.pull_parameters()
    return hash_words(space.arrays.params)


def _hashes_of_slots(space: SharedSpace) -> list[int]:
    """Return the hash of each parameter with its padding, which is zero on every rank."""
    bounds = map(space.precision.nbytes, [*(place.start for place in space.layout.ranges), space.layout.span])
    params = space.arrays.params
    return [hash_words(params[start:stop], start // WORD) for start, stop in itertools.pairwise(bounds)]


def _majority(values: np.ndarray) -> list[int]:
    """Return the ranks of the largest group with the same value; of equally large ones that with the lowest rank."""
    groups: dict[int, list[int]] = {}
    for rank, value in enumerate(values.tolist()):
        groups.setdefault(value, []).append(rank)
    return max(groups.values(), key=len)


def describe(names: Sequence[str], by_slot: np.ndarray, name_of: Callable[[Sequence[int]], str] = name_ranks) -> str:
    """Return in words which parameters differ on which ranks; by_slot: hashes, (ranks, parameters)."""
    differing = [index for index in range(len(names)) if not all_alike(by_slot[:, index])]
    parts = [f"{names[index]!r} {_sides(by_slot[:, index], name_of)}" for index in differing[:_MOST_NAMED]]
    if len(differing) > _MOST_NAMED:
        parts.append(f"{len(differing) - _MOST_NAMED} more parameters differ")
    return f"replicas: expected the same parameters on every rank, but {', '.join(parts)}"


def _sides(values: np.ndarray, name_of: Callable[[Sequence[int]], str]) -> str:
    majority = _majority(values)
    others = [rank for rank in range(len(values)) if rank not in majority]
    if 2 * len(majority) > len(values):
        return f"on {name_of(others)} differs from {name_of(majority)}"
    return f"differs between {name_of(range(len(values)))}"


# --- The origin of NaN and Inf in the ranks' gradients. ---

#: (parameter, NaNs, Infs)
NonFinite = tuple[str, int, int]


def raise_non_finite(
    comm: Communicator, layout: FlatLayout, ranges: Sequence[ParameterRange], own: np.ndarray, mean: np.ndarray
) -> NoReturn:
    """Raise the same NonFiniteError on every rank, naming parameter and ranks; collective.

    own, mean: flat arrays of this rank's gradients and of the mean, of which some rank's holds NaN or Inf in `ranges`.
    """
    first = [first_non_finite(ranges, [layout.view(flat, place.name) for place in ranges]) for flat in (own, mean)]
    raise_found(comm, *first)


def raise_found(comm: Communicator, own: NonFinite | None, mean: NonFinite | None) -> NoReturn:
    """Raise the same NonFiniteError on every rank, from what each found in its own and in the mean; collective."""
    found = comm.all_gather_object((own, mean), label=CHECKS)
    in_mean = next((theirs for _, theirs in found if theirs is not None), None)
    raise NonFiniteError(_describe([theirs for theirs, _ in found], in_mean, comm.name_ranks))


def first_non_finite(ranges: Sequence[ParameterRange], gradients: Iterable[np.ndarray]) -> NonFinite | None:
    """Return the first parameter whose array, all of its gradient or a part, holds NaN or Inf, with their numbers."""
    for place, gradient in zip(ranges, gradients, strict=True):
        nans, infs = int(np.isnan(gradient).sum()), int(np.isinf(gradient).sum())
        if nans or infs:
            return place.name, nans, infs
    return None


def _describe(origins: list[NonFinite | None], mean: NonFinite | None, name_of: Callable[[Sequence[int]], str]) -> str:
    found = [
        f"{name!r} has {nans} NaN and {infs} Inf on {name_of([rank])}"
        for rank, origin in enumerate(origins)
        if origin is not None
        for name, nans, infs in [origin]
    ]
    if not found and mean is not None:
        found = [f"{mean[0]!r} overflows when the ranks' finite gradients are compressed or added"]
    return (
        f"gradient: expected finite numbers, but {', '.join(found)}; "
        "lower the learning rate or look at that rank's batch"
    )


# --- One flipped bit in a model's memory, as faulty memory would flip it: for `clcomm run --chaos` and the tests. ---

#: The places of a flip in an averaging.
OWN, MEAN = "own gradient", "mean"


def flip_bit(array: np.ndarray, where: int) -> None:
    """Flip a bit of a contiguous array."""
    words = array.reshape(-1).view(np.uint8)
    words[where // 8 % words.size] ^= 1 << where % 8


def _chosen(space: SharedSpace, where: int) -> ParameterRange:
    return space.layout.ranges[where // 1009 % len(space.layout.ranges)]


def flip_in_space(flat: np.ndarray, space: SharedSpace, where: int, nbytes: Callable[[int], int] = int) -> str:
    """Flip a bit of one parameter's part of a flat array, and return the parameter's name.

    nbytes: returns how many bytes of the array so many of float32 take.
    """
    chosen = _chosen(space, where)
    start = nbytes(chosen.start)
    flip_bit(flat[start : start + nbytes(chosen.nbytes)], where)
    return chosen.name


class PlannedFlip:
    """A bit to flip in a model's next averaging, or in its parameters at once.

    Args:
        space: the model's flat space.
        where: chooses the place and the bit.

    Attributes:
        place: MEAN, or OWN, this rank's gradients, of models whose flat space kernels read; else "".
        said: which memory has the bit, in words; "": this rank keeps only a shard of the parameters.
    """

    def __init__(self, space: SharedSpace, where: int):
        self._space, self._where = space, where // 3
        flat = space.flat_space
        self.place = "" if flat is None or flat.is_staged or space.shards is not None else (MEAN, OWN, "")[where % 3]
        name = _chosen(space, self._where).name
        self.said = f"the {self.place} of {name!r}" if self.place else f"parameter {name!r}" * space.has_parameters
        if not self.place and space.has_parameters:
            space.adapter.pull_parameters()
            flip_in_space(space.arrays.params, space, self._where, space.precision.nbytes)
            space.adapter.push_parameters()

    def flip(self, flat: np.ndarray) -> None:
        """Flip it in the gradients, which kernels may still be writing."""
        if self._space.flat_space is not None:
            self._space.flat_space.device.finish()
        flip_in_space(flat, self._space, self._where)
