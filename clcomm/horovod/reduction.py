"""The reduction of an optimizer's gradients, as backward completes them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from clcomm.base.errors import ArgumentError
from clcomm.comm.collectives.runner import CollectiveRunner, refused_on_all
from clcomm.comm.stats.events import Phase, count_step
from clcomm.comm.tensors.collectives import TensorCollectives
from clcomm.comm.tensors.step_settings import StepSettings
from clcomm.horovod import joined, world
from clcomm.horovod.calls import Adasum, call_of
from clcomm.horovod.gradients import GradientBuckets, require_same_start
from clcomm.horovod.operations import AllReduce, Compression, ReduceOp, raising_internal_errors
from clcomm.horovod.world import ProcessSet, global_process_set
from clcomm.sync.agreement import SettingsAgreement
from clcomm.sync.synchronizer import GRADIENTS
from clcomm.sync.torch_replicas import TorchReplicas


class Reductions:
    """The reductions of live optimizers, and of all ranks' the numbers, which are the same on every rank.

    Attributes:
        live: all of them.
        numbered: those of all ranks, by the order in which they were made.
        made: how many of these there were.
        several: whether another was alive on any rank when the last one was made; the same on every rank, too.
        last: the gradients of the last one, which all ranks keep when they drop it, each at a time of its own; None:
            a process set's was made since.
    """

    def __init__(self) -> None:
        self.live: weakref.WeakSet[Reduction] = weakref.WeakSet()
        self.numbered: weakref.WeakValueDictionary[int, Reduction] = weakref.WeakValueDictionary()
        self.made, self.several = 0, False
        self.last: GradientBuckets | None = None

    def number(self, reduction: Reduction) -> int:
        """Return the number of a new one of all ranks; collective."""
        self.several = any(world.communicator().all_gather_object(bool(self.numbered), label="join"))
        number, self.made = self.made, self.made + 1
        self.numbered[number] = reduction
        return number

    def followed(self) -> GradientBuckets | None:
        """Return the gradients of the one that ranks step without an announcement; None: there is none."""
        alive = self.numbered.get(self.made - 1)
        return None if self.several else self.last or (None if alive is None else alive.buckets)


known_reductions = Reductions()


class UsageError(ArgumentError, AssertionError):
    """Calls of a DistributedOptimizer in an order that would use wrong gradients."""


class Reduction:
    """The reduction of one optimizer's gradients: which are complete, and what reduces them.

    Args:
        optimizer: the wrapped optimizer.
        names: of all its parameters.
        compression: a Compressor.
        passes: backwards before a step.
        op: Average, Sum or Adasum.
        predivide: see `DistributedOptimizer`.
        groups: how many groups of gradients are reduced together, 0: as many as fit into a bucket; or the groups'
            parameters.
        process_set: the ranks.
    """

    def __init__(
        self, optimizer: Any, names: Mapping[torch.Tensor, str], compression: Any, passes: int, op: ReduceOp,
        predivide: float, groups: int | Sequence[Sequence[torch.Tensor]], process_set: ProcessSet,
    ):  # fmt: skip
        self.optimizer, self.compression, self.op = weakref.ref(optimizer), compression, op
        self.passes, self._names, self._predivide, self._process_set = passes, dict(names), predivide, process_set
        self._groups = groups
        self._left: dict[torch.Tensor, int] = {}  # backwards to come, by parameter
        #: None with Adasum and with a program's own compressor.
        self.buckets: GradientBuckets | None = None
        self._is_compared = False  # whether the ranks' parameters were, where there are no buckets
        self._generation, self._left_names = -1, set[str]()
        self.synchronized, self.should_synchronize = False, True
        self._hooked: set[torch.Tensor] = set()
        self._step_ended_s = 0.0
        self._communicated_s = 0.0
        self._unhook: list[weakref.finalize[..., Reduction]] = []
        self.is_replaced = False
        taken = {id(each) for each in self.trained().values()}
        for each in list(known_reductions.live):
            each.leave(taken)
        if self.is_needed:
            self._prepare()
        if process_set is not global_process_set:
            known_reductions.last = None
        known_reductions.live.add(self)
        self._number = -1
        if self.buckets is not None and process_set is global_process_set:
            self._number = known_reductions.number(self)

    def leave(self, taken: set[int]) -> None:
        """Leave the gradients to an optimizer that is made later, where it has some of the parameters; `taken`: ids."""
        if any(id(each) in taken for each in self._left):
            self.is_replaced = True
            known_reductions.numbered.pop(self._number, None)
            for unhook in self._unhook:
                unhook()

    @property
    def is_needed(self) -> bool:
        """Whether there are other ranks; a rank outside of the process set steps by itself, as with Horovod."""
        return self._process_set.included() and self._process_set.size() > 1

    @property
    def runner(self) -> CollectiveRunner | None:
        """What raises a mistake of this rank on all; None: there are no others."""
        return self._process_set.communicator().runner if self.is_needed else None

    @property
    def is_numbered(self) -> bool:
        """Whether it is one of all ranks' that other ranks know by its number."""
        return self._number >= 0

    def trained(self) -> dict[str, torch.Tensor]:
        """Return the parameters that need gradients, by name."""
        groups = self.optimizer().param_groups  # type: ignore[union-attr]
        return {self._name(each): each for group in groups for each in group["params"] if each.requires_grad}

    def _name(self, parameter: torch.Tensor) -> str:
        return self._names.setdefault(parameter, f"allreduce.noname.{len(self._names)}")

    def _prepare(self) -> None:
        """Make the buckets where there are none for these ranks and parameters; collective then."""
        trained = self.trained()
        if self._generation == global_process_set.generation and trained.keys() == self._left_names:
            return
        if self.buckets is not None and self._generation == global_process_set.generation:
            self.buckets.drop()
        self._generation, self._left_names = global_process_set.generation, set(trained)
        self._settings, self._agreement = StepSettings(trained.values()), SettingsAgreement()
        self._replicas: TorchReplicas | None = None
        self.start_over()
        for parameter in trained.values():
            if parameter not in self._hooked:
                self._hooked.add(parameter)
                hook = parameter.register_post_accumulate_grad_hook(partial(_completed, weakref.ref(self)))
                # a hook that held this object would outlive the optimizer
                self._unhook.append(weakref.finalize(self, hook.remove))
        self.buckets = None
        if self.op is not Adasum and self.compression in (Compression.none, Compression.fp16) and trained:
            comm, halves = self._process_set.communicator(), self.compression is Compression.fp16
            groups = self._grouped(trained) if self._groups else None
            self.buckets = GradientBuckets(comm, trained, self.op.value, halves, self._predivide, groups)
            if self._process_set is global_process_set:
                known_reductions.last = self.buckets
                weakref.finalize(self, _forget_parameters, weakref.ref(self.buckets))

    def _grouped(self, trained: Mapping[str, torch.Tensor]) -> list[list[str]]:
        """Return the names of each group's parameters; without groups that of all.

        A parameter that is in no group is one of its own.
        """
        names = list(trained)
        if not self._groups:
            return [names]
        if isinstance(self._groups, int):
            return [list(part) for part in np.array_split(np.array(names, object), self._groups) if len(part)]
        groups = [[self._name(each) for each in group if self._name(each) in trained] for group in self._groups]
        grouped = {name for group in groups for name in group}
        return [group for group in groups if group] + [[name] for name in names if name not in grouped]

    def start_over(self) -> None:
        """Expect all backwards of a step."""
        self._left = dict.fromkeys(self.trained().values(), self.passes)

    @property
    def is_under_way(self) -> bool:
        """Whether backward has completed gradients that are not reduced yet; those of lost ranks never will be."""
        if self._generation != global_process_set.generation or self.op is Adasum or not self.is_needed:
            return False
        return any(left < self.passes for left in self._left.values())

    def has_new_gradients(self) -> bool:
        """Return whether backward has run on any rank since the gradients were reduced; collective."""
        if not self.is_needed:
            return False
        mine = torch.tensor([float(self.is_under_way)])
        return bool(call_of(AllReduce, [mine], self._process_set, "synchronized", ReduceOp.Max).run()[0])

    def require_reduced(self) -> None:
        """Raise UsageError where backward has run since the gradients were reduced."""
        if self.is_under_way:
            raise UsageError(
                "skip_synchronize: expected synchronize() after the last backward(), got gradients that are not reduced"
            )

    @refused_on_all
    def note_complete(self, parameter: torch.Tensor) -> None:
        """Note a gradient that backward has completed."""
        if not self.is_needed or self.op is Adasum:
            return
        if self._generation != global_process_set.generation or parameter not in self._left:
            self._prepare()
        left = self._left.get(parameter, self.passes)
        if left == 0:
            raise UsageError(
                f"gradient of {self._name(parameter)!r}: expected at most {self.passes} backward passes before step() "
                "or synchronize(), got another; increase backward_passes_per_step"
            )
        self._left[parameter] = left - 1
        if left == 1 and self.buckets is not None:
            self.buckets.add(self._name(parameter))

    def finish(self) -> None:
        """Replace the gradients by the reduced ones; collective."""
        if self.is_replaced:
            raise UsageError("step: expected the DistributedOptimizer that these parameters got last, got an older one")
        if self.is_needed and self.op is not Adasum:
            self._prepare()
            try:
                self._reduce()
            finally:
                self.start_over()  # so that a caller who catches the error can run backward again
        self.synchronized = True

    def _reduce(self) -> None:
        if self.buckets is None:
            self.require_same_start()
            self._reduce_compressed()
            return
        if self.is_numbered and (known_reductions.several or global_process_set.some_joined):
            has_older, self.buckets.has_older = self.buckets.has_older, self.buckets.is_begun
            if _stepping(self._number, has_older):
                self.buckets.drop()
        self.buckets.finish()
        if self.buckets.all_took_part:  # ranks that have joined compare nothing
            self._compare()
        if self.is_numbered:
            global_process_set.some_joined = not self.buckets.all_took_part

    def _compare(self) -> None:
        """Compare new settings, and replicas of unlike devices where that is due; collective."""
        comm = self._process_set.communicator()
        self._agreement.compare(comm, self._settings.new)
        if self._replicas is None:
            self._replicas = TorchReplicas(TensorCollectives(comm, moves_buffers=False), self.trained())
        self._replicas.averaged()

    def require_same_start(self) -> None:
        """Compare new settings, and before the first reduction without buckets the ranks' parameters; collective."""
        self._compare()
        if not self._is_compared:
            self._is_compared = True
            require_same_start(self._process_set.communicator(), self.trained())

    @torch.no_grad()
    def _reduce_compressed(self) -> None:
        """Reduce with a program's own compressor, each gradient by itself."""
        trained = self.trained()
        for parameter in trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for names in self._grouped(trained):
            gradients = [gradient for name in names if (gradient := trained[name].grad) is not None]
            for gradient, reduced in zip(gradients, self._compressed(gradients, self.op), strict=True):
                gradient.copy_(reduced)

    @raising_internal_errors()
    def _compressed(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> list[torch.Tensor]:
        """Return tensors that were reduced in their compressed form."""
        small = [self.compression.compress(each) for each in tensors]
        given, factors = [each for each, _ in small], (1.0 / self._predivide, self._predivide)
        call = call_of(AllReduce, given, self._process_set, GRADIENTS, op, *factors)
        found = call.change(call.operation.run(self._process_set.require_collectives()))
        return [self.compression.decompress(each, context) for each, (_, context) in zip(found, small, strict=True)]

    @torch.no_grad()
    def add_steps(self, starts: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Replace each rank's step by the adaptive sum of all ranks' steps; collective.

        starts: the parameters' values before this rank's step.
        """
        trained = self.trained()
        for names in self._grouped(trained):
            group = [trained[name] for name in names]
            moved = self._compressed([parameter - starts[parameter] for parameter in group], Adasum)
            for parameter, step in zip(group, moved, strict=True):
                parameter.copy_(starts[parameter] + step)

    def note_step(self) -> None:
        """Report the time since the last step as a step, with its part in communication."""
        if not self._process_set.included() or not count_step(id(self)):
            return
        comm, now = self._process_set.communicator(), time.perf_counter()
        spent = comm.communicated() + sum(
            each.buckets.comm.communicated() for each in known_reductions.live if each.buckets
        )
        if self._step_ended_s:
            began, seconds = self._step_ended_s, now - self._step_ended_s
            communication_s = min(seconds, max(0.0, spent - self._communicated_s))
            comm.notify_phase(Phase("step", began, seconds, communication_s=communication_s))
        self._step_ended_s, self._communicated_s = now, spent


def _forget_parameters(buckets: weakref.ref[GradientBuckets]) -> None:
    if (alive := buckets()) is not None:
        alive.forget_parameters()


def _completed(reduction: weakref.ref[Reduction], parameter: torch.Tensor) -> None:
    alive = reduction()
    if alive is not None:
        alive.note_complete(parameter)


@raising_internal_errors()
def _stepping(number: int, has_older: bool) -> bool:
    """Tell the other ranks which optimizer this one steps; return whether any has begun what failed. Collective.

    Ranks that have joined learn from it in which order a program with several optimizers steps them.
    """
    everyone, have_older = joined.tell(number, has_older).wait().T.tolist()
    found = sorted({each for each in everyone if each != joined.HAS_JOINED})
    if len(found) > 1:
        raise UsageError(
            f"step: expected the same DistributedOptimizer on every rank, got numbers {found} in the order in which "
            f"they were made ({joined.OPERATES}: another operation); step them in the same order"
        )
    return any(have_older)
