"""A model's gradients in buckets, which ranks begin to reduce while backward goes on.

The buckets have a Communicator of their own: a program may call other operations between backward and the optimizer's
step, and ranks whose backwards left out different parameters have begun different buckets by then. What happens on it
is counted by the program's Communicator too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
import torch

from clcomm.base.errors import MismatchError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import ParameterSpec
from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.events import Collective, Phase
from clcomm.comm.tensors.arrays import HostCopies, bytes_of, dtype_name
from clcomm.horovod.operations import raising_internal_errors
from clcomm.sync.adapters.adapter import FLAT_DTYPES, CopyingAdapter, FlatArrays
from clcomm.sync.adapters.torch_slots import real, values
from clcomm.sync.agreement import CHECKS, require_agreement
from clcomm.sync.bucket_plan import BucketPlan, BucketRun
from clcomm.sync.divergence import describe, hashes_of_arrays

#: One more number in the first bucket: 1 from a rank with gradients, 0 from one that has joined.
_PRESENCE = "a rank takes part"


def require_same_start(comm: Communicator, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise MismatchError on every rank where parameters differ before the first step; collective.

    parameters: by name, in the same order on every rank; none on a rank that has joined.
    """
    on_host = HostCopies(comm.notify_phase).on_host
    own = hashes_of_arrays({name: bytes_of(on_host(each, CHECKS)) for name, each in parameters.items()})
    whole = np.array([sum(own.values()) % 2**64, len(own)], np.uint64)
    rows = comm.all_gather(whole, label=CHECKS)
    present = [rank for rank in range(comm.size) if rows[rank, 1]]
    if len({int(rows[rank, 0]) for rank in present}) < 2:
        return
    most = int(rows[:, 1].max())
    everyone = comm.all_gather(np.array([*own.values()] or [0] * most, np.uint64), label=CHECKS)
    found = describe([*parameters], everyone[present], lambda ranks: comm.name_ranks([present[each] for each in ranks]))
    raise MismatchError(f"{found}; call hvd.broadcast_parameters(model.state_dict(), 0) before the first step")


class _Forwarding:
    """Tells the observers of one Communicator what happens on another."""

    def __init__(self, comm: Communicator):
        self._comm = comm

    def collective_finished(self, event: Collective) -> None:
        self._comm.notifier.notify_collective(event)

    def phase_finished(self, phase: Phase) -> None:
        self._comm.notify_phase(phase)


class _OptimizerGradients(CopyingAdapter):
    """The gradients of an optimizer's parameters in flat arrays, with the presence of this rank.

    Args:
        comm: whose memory the arrays are.
        parameters: by name.
        specs: what their gradients are reduced as.
        predivide: by what gradients are divided before the reduction, and multiplied afterwards.
    """

    def __init__(
        self, comm: Communicator, parameters: Mapping[str, torch.Tensor], specs: list[ParameterSpec], predivide: float
    ):
        self.parameters, self._predivide = dict(parameters), predivide
        self.layout = layout = FlatLayout([*specs, ParameterSpec(_PRESENCE, (1,), specs[-1].dtype)])
        grads, reduced = comm.allocate(layout.span), comm.allocate_common(layout.span)
        self.arrays = FlatArrays(np.empty(0, np.uint8), grads, reduced)
        names = [place.name for place in layout.ranges]
        self._own = {name: torch.from_numpy(layout.view(grads, name)) for name in names}
        self._reduced = {name: torch.from_numpy(layout.view(reduced, name)) for name in names}
        self._sparse_dims: dict[str, int] = {}
        #: Whether this rank has gradients; otherwise the arrays hold zeros in their place.
        self.is_present = True

    @property
    def adapter(self) -> _OptimizerGradients:
        """The copies between parameters and arrays."""
        return self

    @property
    def present(self) -> float:
        """The presences of the ranks, reduced as the gradients were."""
        return float(self._reduced[_PRESENCE][0])

    def leave(self) -> None:
        """Put zeros in place of this rank's gradients."""
        self.is_present = False
        for own in self._own.values():
            own.zero_()

    @torch.no_grad()
    def pull_gradients(self, bucket: Bucket) -> None:
        """Copy a bucket's gradients to the arrays; a missing one counts as zero."""
        for place in bucket.opening if self.is_present else ():
            if place.name == _PRESENCE:
                self._own[_PRESENCE].fill_(1.0)
            else:
                self._pack(place.name)

    def _pack(self, name: str) -> None:
        gradient, own = self.parameters[name].grad, self._own[name]
        if gradient is None:
            own.zero_()
            return
        if gradient.is_sparse:
            self._sparse_dims[name] = gradient.sparse_dim()
        own.copy_(values(gradient))
        if self._predivide != 1.0:
            own.mul_(1.0 / self._predivide)

    @torch.no_grad()
    def push_gradients(self, bucket: Bucket) -> None:
        """Replace a bucket's gradients by the reduced ones."""
        for place in bucket.closing:
            if place.name != _PRESENCE:
                self._unpack(place.name)

    def _unpack(self, name: str) -> None:
        parameter, reduced = self.parameters[name], self._reduced[name]
        if self._predivide != 1.0:
            reduced = reduced * self._predivide
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            gradient = torch.empty_like(parameter)
        real(gradient).copy_(reduced)
        parameter.grad = gradient if name not in self._sparse_dims else gradient.to_sparse(self._sparse_dims[name])


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
        specs = [_spec(name, parameter, halves) for name, parameter in parameters.items()]
        lines = [f"{spec.name} {spec.shape} {spec.dtype}" for spec in specs]
        lines += [f"op {op}, predivided by {predivide}", *(f"group of {', '.join(names)}" for names in groups or ())]
        require_agreement(comm, "gradients", lines, "wrap the same optimizer and model on every rank")
        if groups is not None:
            specs = _by_groups(specs, groups)
        self._home, self.comm = comm, (own_comm := Communicator(comm.comm, **comm.settings()))
        own_comm.add_observer(_Forwarding(comm))
        self._gradients = _OptimizerGradients(own_comm, parameters, specs, predivide)
        layout = self._gradients.layout
        self.buckets = layout.buckets(comm.bucket_size) if groups is None else _cut_by_groups(layout, groups)
        self._run = BucketRun(BucketPlan(own_comm, self._gradients, self.buckets, op=op), besides=(_PRESENCE,))
        self._is_compared = False  # whether the ranks' parameters were compared
        self._full = 1.0 if op == "mean" else float(comm.size)
        #: Whether what has begun is of a step that failed before `finish`.
        self.has_older = False
        #: Whether all ranks had gradients at the last `finish`; the same on all that had.
        self.all_took_part = True

    def forget_parameters(self) -> None:
        """Let go of the parameters, as their optimizer is gone."""
        self._gradients.parameters.clear()

    def _start_over(self) -> None:
        self._run.start_over()
        self._gradients.is_present, self.has_older = True, False

    def add(self, name: str) -> None:
        """Note that a gradient is complete, and begin the buckets that are, in their order."""
        self._run.readiness.complete(name)
        if self._run.readiness.is_next_complete:
            self._begin_complete()

    @raising_internal_errors()
    def _begin_complete(self) -> None:
        while self._run.readiness.is_next_complete:
            self._run.begin()
        self._run.advance()  # fold the buckets that all ranks have begun

    def finish(self) -> None:
        """Begin the rest, a missing gradient being zero, and replace all gradients by the reduced ones; collective."""
        try:
            self._complete()
            self.all_took_part = self._gradients.present == self._full
            self._run.plan.push_all()
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
        self._gradients.leave()
        self._run.begin_rest()

    @property
    def is_begun(self) -> bool:
        """Whether an all-reduce was begun since the last `finish`."""
        return self._run.has_begun

    def is_complete(self) -> bool:
        """Advance what was begun without blocking, and return whether all of it is complete."""
        return self._run.advance()

    def take_part(self) -> bool:
        """Reduce with zeros in place of this rank's gradients; return whether another rank has some. Collective."""
        self.begin_without()
        try:
            self._complete()
            return self._gradients.present > 0
        finally:
            self._start_over()

    @raising_internal_errors()
    def _complete(self) -> None:
        self._run.begin_rest()
        with self.comm.runner.awaited_from(self._home.runner, "step() of a DistributedOptimizer"):
            self._run.wait()
        if not self._is_compared:
            self._is_compared = True
            # where all take part, on the program's Communicator, in which a rank that raises an error meets the others
            comm = self._home if self._gradients.present == self._full else self.comm
            require_same_start(comm, self._gradients.parameters if self._gradients.is_present else {})


def _spec(name: str, parameter: torch.Tensor, halves: bool) -> ParameterSpec:
    numbers = real(parameter.detach())
    dtype = "float16" if halves and not parameter.dtype.is_complex else FLAT_DTYPES[dtype_name(numbers.dtype)]
    return ParameterSpec(name, tuple(numbers.shape), dtype)


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
