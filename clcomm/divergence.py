"""Replicas that drift apart: found by a hash, named by parameter and rank, and brought together again if asked."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from clcomm.agreement import CHECKS, all_alike, named_ranks
from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError, DivergenceError
from clcomm.hashing import WORD, hash_words
from clcomm.shared_space import SharedSpace

ON_DIVERGENCE = ("raise", "rebroadcast")
_MOST_NAMED = 4
_log = logging.getLogger("clcomm")


class Divergence(NamedTuple):
    """Which parameters differ on which ranks, in words, and the rank that has what most ranks have."""

    text: str
    source: int


class ReplicaGuard:
    """Compares the replicas of a Synchronizer's models, and does what `on_divergence` says where they differ.

    every: after so many synchronisations; 0: only when told. `checks` and `divergences` count for reports.
    """

    def __init__(self, comm: Communicator, every: int, on_divergence: str):
        if not isinstance(every, int) or every < 0:
            raise ArgumentError(f"check_replicas_every: expected a number of steps, 0 for never, got {every!r}")
        if on_divergence not in ON_DIVERGENCE:
            raise ArgumentError(f"on_divergence: expected {' or '.join(ON_DIVERGENCE)}, got {on_divergence!r}")
        self._comm, self.every, self.on_divergence = comm, every, on_divergence
        self.checks = self.divergences = 0
        self._optimizers: dict[int, Any] = {}
        self._warned = False

    def attach(self, model: Any, optimizer: Any) -> None:
        """Let a model's optimizer get the source's state when its parameters are sent anew.

        A sharded one has nothing to get: each part of its state is there once.
        """
        if not getattr(optimizer, "is_sharded", False):
            self._optimizers[id(model)] = optimizer

    def is_due(self, space: SharedSpace) -> bool:
        """Say whether it is time to compare, after a synchronisation."""
        return self.every > 0 and space.synchronisations % self.every == 0

    def require_alike(self, space: SharedSpace) -> None:
        """Raise DivergenceError on every rank where the replicas differ; collective."""
        found = self._find(space)
        if found is not None:
            raise DivergenceError(f"{found.text}; broadcast the parameters again and look for the cause")

    def check(self, space: SharedSpace, broadcast: Callable[[int], None]) -> None:
        """Compare the replicas; where they differ raise DivergenceError on every rank, or send the majority's.

        broadcast: gives every rank the parameters of a rank, and compares them.
        """
        if self.on_divergence == "raise":
            self.require_alike(space)
            return
        found = self._find(space)
        if found is None:
            return
        if self._comm.rank == 0:
            level = logging.DEBUG if self._warned else logging.WARNING
            _log.log(level, "%s; all go on with rank %d's", found.text, found.source)
        self._warned = True
        broadcast(found.source)
        self._broadcast_optimizer(space, found.source)

    def _find(self, space: SharedSpace) -> Divergence | None:
        self.checks += 1
        found = find_divergence(self._comm, space, on_device=self.every > 0)
        self.divergences += found is not None
        return found

    def _broadcast_optimizer(self, space: SharedSpace, source: int) -> None:
        optimizer = self._optimizers.get(id(space.model))
        if optimizer is None:
            return
        state = optimizer.state_dict() if self._comm.rank == source else None
        state = self._comm.broadcast_object(state, source, label=CHECKS)
        optimizer.load_state_dict(state)


def find_divergence(comm: Communicator, space: SharedSpace, on_device: bool) -> Divergence | None:
    """Compare the replicas' parameters bit by bit, by their hashes; None where all are alike. Collective.

    on_device: hash where the parameters are, if the library can; the first time that builds a kernel.
    """
    own = np.array([_hash_of(space, on_device)], np.uint64)
    hashes = comm.all_gather(own, label=CHECKS)[:, 0]
    if all_alike(hashes):
        return None
    space.replica.pull_parameters()
    by_slot = comm.all_gather(np.array(_hashes_of_slots(space), np.uint64), label=CHECKS)
    names = [slot.name for slot in space.layout.slots]
    return Divergence(describe(names, by_slot), _majority(hashes)[0])


def _hash_of(space: SharedSpace, on_device: bool) -> int:
    hash_there = getattr(space.replica, "hash_parameters", None)
    if on_device and hash_there is not None:
        return hash_there()
    space.replica.pull_parameters()
    return hash_words(space.arrays.params)


def _hashes_of_slots(space: SharedSpace) -> list[int]:
    """Return the hash of each parameter, padding included, which is zero on every rank."""
    bounds = [*(slot.start for slot in space.layout.slots), space.layout.span]
    params = space.arrays.params
    return [hash_words(params[start:stop], start // WORD) for start, stop in itertools.pairwise(bounds)]


def _majority(values: np.ndarray) -> list[int]:
    """Return the ranks of the largest group with the same value; of equally large ones that with the lowest rank."""
    groups: dict[int, list[int]] = {}
    for rank, value in enumerate(values.tolist()):
        groups.setdefault(value, []).append(rank)
    return max(groups.values(), key=len)


def describe(names: Sequence[str], by_slot: np.ndarray) -> str:
    """Return which parameters differ and on which ranks; by_slot: hashes, (ranks, parameters)."""
    differing = [index for index in range(len(names)) if not all_alike(by_slot[:, index])]
    parts = [f"{names[index]!r} {_sides(by_slot[:, index])}" for index in differing[:_MOST_NAMED]]
    if len(differing) > _MOST_NAMED:
        parts.append(f"{len(differing) - _MOST_NAMED} more parameters differ")
    return f"replicas: expected the same parameters on every rank, but {', '.join(parts)}"


def _sides(values: np.ndarray) -> str:
    majority = _majority(values)
    others = [rank for rank in range(len(values)) if rank not in majority]
    if 2 * len(majority) > len(values):
        return f"on {named_ranks(others)} differs from {named_ranks(majority)}"
    return f"differs between {named_ranks(range(len(values)))}"
