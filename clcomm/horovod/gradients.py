"""A model's gradients in buckets, which ranks begin to reduce while backward goes on.

The buckets have a Communicator of their own: a program may call other operations between backward and the optimizer's
step, and ranks whose backwards left out different parameters have begun different buckets by then. What happens on it
is counted by the program's Communicator too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from clcomm.collectives.handle import Handle
from clcomm.communicator import Communicator
from clcomm.errors import MismatchError
from clcomm.flat_space.buckets import Bucket
from clcomm.flat_space.layout import FlatLayout
from clcomm.flat_space.parameters import ParameterSpec
from clcomm.horovod.lost_ranks import raising_internal_errors
from clcomm.stats.events import Collective, Phase
from clcomm.sync.agreement import CHECKS, require_agreement
from clcomm.sync.divergence import describe, hashes_of_arrays
from clcomm.synchronizer import GRADIENTS
from clcomm.tensors.arrays import on_host

#: Half precision has too few bits for a sum over ranks; `Compression.fp16` asks for it all the same.
_SUMMED_AS = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float32",
    torch.bfloat16: "float32",
    torch.complex64: "float32",
    torch.complex128: "float64",
}
#: One more number in the first bucket: 1 from a rank with gradients, 0 from one that has joined.
_PRESENCE = "a rank takes part"


def require_same_start(comm: Communicator, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise MismatchError on every rank where parameters differ before the first step; collective.

    parameters: by name, in the same order on every rank; none on a rank that has joined.
    """
    own = hashes_of_arrays({name: on_host(_bytes(each)).numpy() for name, each in parameters.items()})
    whole = np.array([sum(own.values()) % 2**64, len(own)], np.uint64)
    rows = comm.all_gather(whole, label=CHECKS)
    present = [rank for rank in range(comm.size) if rows[rank, 1]]
    if len({int(rows[rank, 0]) for rank in present}) < 2:
        return
    most = int(rows[:, 1].max())
    everyone = comm.all_gather(np.array([*own.values()] or [0] * most, np.uint64), label=CHECKS)
    found = describe([*parameters], everyone[present], lambda ranks: comm.name_ranks([present[each] for each in ranks]))
    raise MismatchError(f"{found}; call hvd.broadcast_parameters(model.state_dict(), 0) before the first step")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class _Forwarding:
    """Tells the observers of one Communicator what happens on another."""

    def __init__(self, comm: Communicator):
        self._comm = comm

    def collective_finished(self, event: Collective) -> None:
        self._comm.notify_collective(event)

    def phase_finished(self, phase: Phase) -> None:
        self._comm.notify_phase(phase)


class GradientBuckets:
    """The buckets of a model's gradients; making one is collective.

    Args:
        comm: the ranks.
        parameters: those with gradients, by name, in the same order on every rank.
        op: "mean" or "sum".
        halves: whether gradients travel as float16.
        predivide: by what gradients are divided before the reduction, and multiplied afterwards.
        groups: names, each of them once, of the gradients that are reduced together; None: as many as fit into a bucket
            of the Communicator's size.

    Raises MismatchError on every rank where names, shapes, dtypes or groups differ.
    """

    @raising_internal_errors()
    def __init__(
        self, comm: Communicator, parameters: Mapping[str, torch.Tensor], op: str, halves: bool, predivide: float,
        groups: Sequence[Sequence[str]] | None = None,
    ):  # fmt: skip
        self.parameters, self._predivide = dict(parameters), predivide
        specs = [_spec(name, parameter, halves) for name, parameter in parameters.items()]
        lines = [f"{spec.name} {spec.shape} {spec.dtype}" for spec in specs]
        lines += [f"op {op}, predivided by {predivide}", *(f"group of {', '.join(names)}" for names in groups or ())]
        require_agreement(comm, "gradients", lines, "wrap the same optimizer and model on every rank")
        if groups is not None:
            specs = _by_groups(specs, groups)
        layout = FlatLayout([*specs, ParameterSpec(_PRESENCE, (1,), specs[-1].dtype)])
        self.comm = own_comm = Communicator(comm.comm, **comm.settings())
        own_comm.add_observer(_Forwarding(comm))
        own, result = own_comm.allocate(layout.span), own_comm.allocate_common(layout.span)
        names = [*parameters, _PRESENCE]
        self._own = {name: torch.from_numpy(layout.view(own, name)) for name in names}
        self._reduced = {name: torch.from_numpy(layout.view(result, name)) for name in names}
        self.buckets = layout.buckets(comm.bucket_size) if groups is None else _cut_by_groups(layout, groups)
        self._names = [[place.name for place in bucket.opening if place.name != _PRESENCE] for bucket in self.buckets]
        self._bucket_of = {name: index for index, names in enumerate(self._names) for name in names}
        self._starts = [self._prepared(bucket, own, result, op) for bucket in self.buckets]
        self._sparse_dims: dict[str, int] = {}
        self._is_compared = False  # whether the ranks' parameters were compared
        self._full = 1.0 if op == "mean" else float(comm.size)
        #: Whether all ranks had gradients at the last `finish`; the same on all that had.
        self.all_took_part = True
        self._start_over()

    def _prepared(self, bucket: Bucket, own: Any, result: Any, op: str) -> Any:
        part = slice(bucket.start, bucket.stop)
        source, target = own[part].view(bucket.dtype), result[part].view(bucket.dtype)
        return self.comm.all_reduce_async_init(
            source, op, out=target, label=GRADIENTS, nbytes=bucket.nbytes, bucket=bucket.index
        )

    def _start_over(self) -> None:
        self._missing = [set(names) for names in self._names]
        self._handles: list[Handle] = []
        self._present = 1.0

    @property
    def has_begun(self) -> bool:
        """Whether a gradient was added since the last `finish`."""
        return any(len(missing) < len(names) for missing, names in zip(self._missing, self._names, strict=True))

    def add(self, name: str) -> None:
        """Note that a gradient is complete, and begin the buckets that are, in their order."""
        self._missing[self._bucket_of[name]].discard(name)
        if self._is_next_complete():
            self._begin_complete()

    def _is_next_complete(self) -> bool:
        return len(self._handles) < len(self.buckets) and not self._missing[len(self._handles)]

    @raising_internal_errors()
    def _begin_complete(self) -> None:
        while self._is_next_complete():
            self._begin()
        self._handles[-1].done()  # fold the buckets that all ranks have begun

    def finish(self) -> None:
        """Begin the rest, a missing gradient being zero, and replace all gradients by the reduced ones; collective."""
        try:
            self._complete()
            self.all_took_part = float(self._reduced[_PRESENCE][0]) == self._full
            for bucket in self.buckets:
                self._unpack(bucket.index)
        finally:
            self._start_over()  # so that a caller who catches the error can run backward again

    def drop(self) -> None:
        """Complete what ranks have begun, and change no gradient; collective."""
        try:
            self._complete()
        finally:
            self._start_over()

    @raising_internal_errors()
    def begin_without(self) -> None:
        """Begin with zeros in place of this rank's gradients."""
        for own in self._own.values():
            own.zero_()
        self._present = 0.0
        while len(self._handles) < len(self.buckets):
            self._begin()

    @property
    def is_begun(self) -> bool:
        """Whether an all-reduce was begun since the last `finish`."""
        return bool(self._handles)

    def is_complete(self) -> bool:
        """Advance what was begun without blocking, and return whether all of it is complete."""
        return self._handles[-1].done()

    def take_part(self) -> bool:
        """Reduce with zeros in place of this rank's gradients; return whether another rank has some. Collective."""
        self.begin_without()
        try:
            self._complete()
            return bool(self._reduced[_PRESENCE][0] > 0)
        finally:
            self._start_over()

    @raising_internal_errors()
    def _complete(self) -> None:
        while len(self._handles) < len(self.buckets):
            self._begin()
        for handle in self._handles:
            handle.wait()
        if not self._is_compared:
            self._is_compared = True
            require_same_start(self.comm, self.parameters if self._present else {})

    def _begin(self) -> None:
        """Copy the next bucket's gradients and begin its all-reduce."""
        index, began_s = len(self._handles), time.perf_counter()
        if index == 0:
            self._own[_PRESENCE].fill_(self._present)
        if self._present:
            for name in self._names[index]:
                self._pack(name)
            self._note("pack", began_s, index)
        self._handles.append(self._starts[index]())

    @torch.no_grad()
    def _pack(self, name: str) -> None:
        gradient, own = self.parameters[name].grad, self._own[name]
        if gradient is None:
            own.zero_()
            return
        if gradient.is_sparse:
            self._sparse_dims[name] = gradient.sparse_dim()
            gradient = gradient.to_dense()
        own.copy_(_real(gradient))
        if self._predivide != 1.0:
            own.mul_(1.0 / self._predivide)

    @torch.no_grad()
    def _unpack(self, index: int) -> None:
        began_s = time.perf_counter()
        for name in self._names[index]:
            parameter, reduced = self.parameters[name], self._reduced[name]
            if self._predivide != 1.0:
                reduced = reduced * self._predivide
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:
                gradient = torch.empty_like(parameter)
            _real(gradient).copy_(reduced)
            parameter.grad = gradient if name not in self._sparse_dims else gradient.to_sparse(self._sparse_dims[name])
        self._note("unpack", began_s, index)

    def _note(self, name: str, began_s: float, index: int) -> None:
        self.comm.notify_phase(Phase(name, began_s, time.perf_counter() - began_s, GRADIENTS, index))


def _spec(name: str, parameter: torch.Tensor, halves: bool) -> ParameterSpec:
    shape = tuple(parameter.shape) + ((2,) if parameter.dtype.is_complex else ())
    dtype = "float16" if halves and not parameter.dtype.is_complex else _SUMMED_AS[parameter.dtype]
    return ParameterSpec(name, shape, dtype)


def _by_groups(specs: Sequence[ParameterSpec], groups: Sequence[Sequence[str]]) -> list[ParameterSpec]:
    """Return specs such that those of a group and dtype are neighbours, the group that backward completes last first.

    Backward completes a group with the first of its parameters.
    """
    places = {spec.name: place for place, spec in enumerate(specs)}
    ordered = sorted((sorted(places[name] for name in names) for names in groups if names), key=lambda group: group[0])
    return [specs[place] for group in ordered for place in sorted(group, key=lambda place: specs[place].dtype)]


def _cut_by_groups(layout: FlatLayout, groups: Sequence[Sequence[str]]) -> tuple[Bucket, ...]:
    """Return a bucket for each group, and dtype in it; the first has the presence too."""
    group_of = {name: number for number, names in enumerate(groups) for name in names}
    group_of[_PRESENCE] = group_of[layout.specs[-2].name]
    runs = (tuple(run) for _, run in groupby(layout.ranges, lambda place: (group_of[place.name], place.dtype)))
    return tuple(Bucket(index, run, run[0].start, run[-1].stop) for index, run in enumerate(runs))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as reals, a complex one's as pairs; a view."""
    return torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor
