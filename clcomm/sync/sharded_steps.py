"""A model's steps over logical shards: the random numbers and buffers of each, and the mean of their gradients."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.sync.agreement import CHECKS, refused, require_agreement
from clcomm.sync.bucket_plan import GRADIENTS
from clcomm.sync.logical_shards import LogicalShards, ShardMean
from clcomm.sync.model_ranks import ModelRanks, refuse_mixing
from clcomm.sync.shared_space import SharedSpace

if TYPE_CHECKING:
    from clcomm.engine.grad_slot import GradSlot
    from clcomm.engine.tensor import Tensor


class ShardedSteps:
    """One model's steps over logical shards: each in turn draws its own random numbers and has its own buffers.

    Args:
        comm: the ranks.
        space: the model's.
        shards: how the ranks share them out.
        check_finite: see ShardMean.

    Raises ArgumentError, on every rank, for a model with a SyncBatchNorm of other ranks or of another library, or with
    parameters of several dtypes; MismatchError where the library, the kind of device or PyTorch's number of
    threads differs.
    """

    def __init__(self, comm: Communicator, space: SharedSpace, shards: LogicalShards, check_finite: bool = False):
        self.comm, self._space, self._adapter, self.shards = comm, space, space.adapter, shards
        self._mean = ShardMean(comm, space, shards, check_finite) if shards.is_divided else None
        self._buffers: dict[int, dict[str, np.ndarray]] = {}  # by shard, where this rank has several
        self._next = shards.own.start
        #: How many steps have begun, which with the seed decides the random numbers of a library without streams.
        self.steps = 0
        self._seed = 0
        self._add_earlier: Callable[[], None] = lambda: None
        #: Whether a shard's block is open.
        self.is_active = False
        self._is_averaged = False  # within the block of a rank's only shard
        self._started: dict[int, dict[str, np.ndarray]] = {}  # buffers within a step, where shards take turns
        self._gradients: dict[int, list[tuple[GradSlot, Tensor]]] = {}  # likewise
        self._turns: ShardTurns | None = None  # where layers compute with the batches of all shards
        ranks = ModelRanks.of(space)
        if ranks.part is not None or ranks.stages is not None:
            refuse_mixing(space, "shards", "whose statistics are of all shards at once, where ranks divide the model")
        layers = space.layers_over_shards()
        lines = [type(self._adapter).__name__, *self._adapter.decides_bits()]
        require_agreement(
            comm, "shards", lines, "give each rank the same library, kind of device and number of threads"
        )
        foreign = [each for each in layers if not hasattr(type(each), "over_shards")]
        if foreign:
            raise ArgumentError(
                f"shards: expected a model without {type(foreign[0]).__module__}.SyncBatchNorm, whose statistics are "
                "those of ranks; use batch norm, or clcomm's engine, whose SyncBatchNorm follows the shards"
            )
        if layers and shards.is_divided:
            self._turns = ShardTurns(comm, self._resume, self._suspend, self._leave)
        for layer in layers:
            layer.over_shards(comm, self._turns, shards.count)

    @property
    def mean(self) -> ShardMean | None:
        """What averages the shards' gradients; None: each rank has one, and a plain all-reduce does."""
        return self._mean

    @property
    def takes_turns(self) -> bool:
        """Whether this rank's shards take turns within a step, as a layer's statistics are of all shards at once."""
        return self._turns is not None

    @contextmanager
    def active(self, shard: int) -> Iterator[None]:
        """Let forward and backward be those of a shard within this block; a rank's follow each other in order."""
        self._require_next(shard)
        if shard == self.shards.own.start:
            self._begin()
        with self._adapter.shard_block(self._seed_of(shard)):
            self._enter(shard)
            self.is_active = True
            try:
                yield
            finally:
                self.is_active = False
        self._leave(shard)

    @refused
    def _begin(self) -> None:
        """Begin a step: all ranks get rank 0's seed, and earlier gradients are set aside."""
        self._add_earlier = self._adapter.set_aside()
        if (seed := self._adapter.seed()) is not None:
            self._seed = int(self.comm.broadcast(np.array([seed], np.uint64), label=CHECKS)[0])
            self.steps += 1
        own = self.shards.own
        if len(own) > 1 and not self._buffers and (buffers := self._adapter.buffers()):
            self._buffers = dict.fromkeys(own, buffers)

    def _seed_of(self, shard: int) -> int:
        """Return the seed of a shard's numbers in this step, which those of another model of the program are not."""
        return zlib.crc32(f"{self._seed} {self._space.layout.span} {self.steps} {shard}".encode())

    @refused
    def _require_next(self, shard: int) -> None:
        if self._turns is not None:
            raise ArgumentError(
                "shard: expected sync.run_shards(model, compute) with SyncBatchNorm, whose statistics are of all "
                "shards at once, got a block for one shard"
            )
        if shard != self._next or shard not in self.shards.own:
            left = range(self._next, self.shards.own.stop)
            expected = f"shard {left.start}, this rank's next," if left else "sync_gradients() after this rank's shards"
            raise ArgumentError(f"shard: expected {expected} of {self.shards.own}, got {shard!r}")

    @refused
    def run(self, compute: Callable[[int], object]) -> None:
        """Run forward and backward of each of this rank's shards; collective where a layer needs those of all."""
        if self._turns is None:
            for shard in self.shards.own:
                with self.active(shard):
                    compute(shard)
            return
        if self._next != self.shards.own.start:
            raise ArgumentError("run_shards: expected sync_gradients() after this rank's shards, got them again")
        now = self._adapter.buffers()
        self._started = {shard: self._buffers.get(shard, now) for shard in self.shards.own}
        self.is_active = True
        try:
            self._turns.run(self.shards, compute)
        finally:
            self.is_active = False

    def average(self) -> None:
        """Replace the model's gradients by the mean over all shards; collective.

        Raises ArgumentError, on every rank, where one has not computed all of its shards.
        """
        self._completed().run()

    def average_part(self) -> None:
        """Do the same for this rank's part alone, of a sharded update: see `ShardMean.reduce_part`."""
        self._completed().reduce_part()

    def require_complete(self) -> None:
        """Raise ArgumentError, on every rank, where one has not computed all of its shards.

        With one shard for each rank, its block may be open still: buckets are then averaged while backward runs.
        """
        self._is_averaged = self._mean is None and self.is_active and self._turns is None
        if self._next + self._is_averaged != self.shards.own.stop:
            self.comm.runner.refuse(
                f"sync_gradients: expected each of rank {self.comm.rank}'s shards, {self.shards.own}, in a block "
                f"`with sync.shard(model, shard)` before it, got none of shard {self._next}"
            )
        if self._mean is None:  # a plain all-reduce follows
            self._next = self.shards.own.start

    def add_earlier(self) -> None:
        """Follow the averaging: add the gradients that the parameters had before the step's first shard."""
        self._add_earlier()

    def _completed(self) -> ShardMean:
        self.require_complete()
        self._next = self.shards.own.start
        assert self._mean is not None, "each rank has one shard"
        return self._mean

    def start_over(self) -> None:
        """Let all shards have the buffers that the model has now."""
        self._buffers.clear()

    def deal(self, shards: LogicalShards) -> None:
        """Let the ranks share out the shards otherwise, with what each has from step to step; collective.

        Raises ArgumentError, on every rank, where one has computed shards that are not averaged yet.
        """
        if shards.firsts == self.shards.firsts:
            return
        old, numbers = self.shards.own, self._adapter.random_numbers()
        if self._next != old.start:
            self.comm.runner.refuse(
                f"deal_shards: expected it between steps, got it on rank {self.comm.rank} after shard {old.start} and "
                "before sync_gradients()"
            )
        now = self._adapter.buffers()
        buffers = {shard: self._buffers.get(shard, now) for shard in old}
        leaving = {
            shard: (buffers[shard], None if numbers is None else numbers.of_shard(shard))
            for shard in old
            if shard not in shards.own
        }
        for arrived in self.comm.all_gather_object(leaving, label=GRADIENTS):
            for shard, (theirs, state) in arrived.items():
                buffers[shard] = theirs
                if numbers is not None and state is not None and shard in shards.own:
                    numbers.load_shard(shard, state)
        self.shards, self._next = shards, shards.own.start
        self._buffers = {shard: buffers[shard] for shard in shards.own} if now and len(shards.own) > 1 else {}
        if now:
            self._adapter.load_buffers(buffers[shards.own.start])
        if self._mean is not None:
            self._mean.deal(shards)

    def _enter(self, shard: int) -> None:
        numbers = self._adapter.random_numbers()
        if numbers is not None:
            numbers.turn_to(shard)
        if shard in self._buffers:
            self._adapter.load_buffers(self._buffers[shard])

    def _resume(self, shard: int) -> None:
        """Begin a shard's turn, with the random numbers, buffers and gradients that it had."""
        numbers = self._adapter.random_numbers()
        if numbers is not None:
            numbers.turn_to(shard)
        if len(self.shards.own) > 1:
            now = self._adapter.buffers()  # a constant one that backward needs may not be written
            theirs = self._started[shard].items()
            changed = {name: array for name, array in theirs if array.tobytes() != now[name].tobytes()}
            self._adapter.load_buffers(changed)
            for slot, gradient in self._gradients.pop(shard, ()):
                slot.assign(gradient)

    def _suspend(self, shard: int) -> None:
        if len(self.shards.own) > 1 and self._space.flat_space is not None:
            self._started[shard] = self._adapter.buffers()
            self._gradients[shard] = self._space.flat_space.take_gradients()

    def _leave(self, shard: int) -> None:
        if self._mean is not None:
            self._mean.keep(shard)
        self._next = self.shards.own.start if self._is_averaged else shard + 1
        self._is_averaged = False
        own = self.shards.own
        buffers = self._adapter.buffers() if len(own) > 1 else {}
        if buffers:
            self._buffers[shard] = buffers
            if shard + 1 == own.stop:
                # The model's own between steps, so that rank 0's are shard 0's, as `broadcast_buffers` sends them.
                self._adapter.load_buffers(self._buffers[own.start])


# --- A rank's logical shards side by side, for layers whose statistics are of all shards at once. ---
# Each shard computes in a thread of its own, of which one runs at a time. Where a layer needs what all shards have, its
# shard waits and the next one takes its turn; when all of this rank's wait, the ranks exchange, and the first goes on.
# So no kernel's shape, and no order of sums, depends on which rank has a shard.


class _Abandoned(BaseException):
    """Ends a shard's thread after another shard's error."""


class ShardTurns:
    """Lets a rank's shards take turns, and gathers what all shards have.

    Args:
        comm: the ranks.
        resume, suspend: called with a shard before and after each of its turns.
        finish: called in place of `suspend` after its last turn.
    """

    def __init__(
        self, comm: Communicator, resume: Callable[[int], None], suspend: Callable[[int], None],
        finish: Callable[[int], None],
    ):  # fmt: skip
        self.comm = comm
        self._resume, self._suspend, self._finish = resume, suspend, finish
        self._current: _Turn | None = None

    def run(self, shards: LogicalShards, compute: Callable[[int], object]) -> None:
        """Call `compute` for each of this rank's shards; collective where a layer gathers.

        Raises the first shard's error that there is, and ArgumentError where shards gather other things.
        """
        turns = [_Turn(shard, compute) for shard in shards.own]
        try:
            while not all(turn.is_done for turn in turns):
                for turn in turns:
                    self._take(turn)
                waiting = [turn for turn in turns if not turn.is_done]
                if waiting:
                    self._exchange(shards, turns, waiting)
        finally:
            self._current = None
            for turn in turns:
                turn.abandon()

    def gather(self, values: np.ndarray, label: str) -> np.ndarray:
        """Return the values of all shards, (shards, *values.shape); called within `compute`."""
        if self._current is None:
            raise ArgumentError(
                "SyncBatchNorm: expected a forward of logical shards within sync.run_shards(model, compute), as its "
                "statistics are of all of them at once"
            )
        return self._current.wait_for(values, label)

    def _take(self, turn: _Turn) -> None:
        self._current = turn
        self._resume(turn.shard)
        turn.go_on()
        (self._finish if turn.is_done else self._suspend)(turn.shard)

    def _exchange(self, shards: LogicalShards, turns: Sequence[_Turn], waiting: Sequence[_Turn]) -> None:
        kinds = {(turn.values.shape, turn.label) for turn in waiting}
        if len(waiting) < len(turns) or len(kinds) > 1:
            self.comm.runner.refuse(
                "run_shards: expected the same layers in each shard's forward and backward, got others among those of "
                f"rank {self.comm.rank}, {shards.own}"
            )
        own = np.zeros((max(shards.counts), *waiting[0].values.shape), waiting[0].values.dtype)
        for row, turn in zip(own, waiting, strict=False):  # other ranks may have more rows
            row[...] = turn.values
        everyone = self.comm.all_gather(own, label=waiting[0].label)
        rows = np.concatenate([theirs[:count] for theirs, count in zip(everyone, shards.counts, strict=True)])
        for turn in waiting:
            turn.everyone = rows


class _Turn:
    """A shard's computation in a thread, which runs from one call of `go_on` to the return of it."""

    def __init__(self, shard: int, compute: Callable[[int], object]):
        self.shard, self.is_done = shard, False
        self.values, self.everyone, self.label = np.empty(0), np.empty(0), ""
        self._compute = compute
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=f"clcomm-shard-{shard}", daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Run until the computation waits for other shards, or has ended; raises its error."""
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def wait_for(self, values: np.ndarray, label: str) -> np.ndarray:
        """Let other shards run, in this one's thread, until all of them have such values; return those of all."""
        self.values, self.label = values, label
        self._back.release()
        self._go.acquire()
        if self._is_abandoned:
            raise _Abandoned
        return self.everyone

    def abandon(self) -> None:
        """End the computation where it waits, and its thread."""
        self._is_abandoned = True
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._is_abandoned:
                self._compute(self.shard)
        except _Abandoned:
            pass
        except BaseException as error:  # raised in the rank's own thread
            self._error = error
        self.is_done = True
        self._back.release()
