"""An audit of the ranks' work: at every N-th step each rank computes another's batch too, and the bits are compared.

The same batch, parameters and random numbers give the same bits on every rank whose device and kernels are the same, so
one bit that differs is proof of a fault. Where two ranks differ, all ranks compute that batch again, and what most of
them get is right. Recomputing elsewhere what cannot be trusted is how fleets look for processors that compute wrongly:
Hochschild et al., "Cores that don't count", HotOS 2021.
"""

from __future__ import annotations

import logging
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError, DivergenceError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.engine.random_stream import RandomStream
from clcomm.sync import replicas
from clcomm.sync.agreement import CHECKS
from clcomm.sync.divergence import hashes_of_arrays
from clcomm.sync.model_ranks import ModelRanks, refuse_mixing

if TYPE_CHECKING:
    from clcomm.engine.flat import FlatSpace
    from clcomm.sync.synchronizer import Synchronizer

#: Hashes of what a rank computed from a batch, each by its kind, its place among several of this kind, and its name.
Bits = dict[tuple[str, int, str], int]
#: A mean is summed again in two parts, so that ranks sum other elements than before; there are so many places to cut,
#: as a sum over new arrays takes ten times as long as one over those of an earlier audit.
_CUTS = 4
#: Elements of which each part is a multiple.
_GRAIN = 128
_GRADIENT, _BUFFER, _LOSS = "gradient", "buffer", "the loss"
_log = logging.getLogger("clcomm")


class _Part(NamedTuple):
    """One forward and backward: what it began with, and what it left beside gradients."""

    batch: Any
    numbers: np.ndarray
    buffers: dict[str, np.ndarray]
    loss: float
    buffers_after: dict[str, np.ndarray]


class _Work(NamedTuple):
    """A rank's parts of a step; `is_sum`: whether their gradients are added up to one."""

    parts: list[_Part]
    is_sum: bool


class Audit:
    """Compares, at every N-th step, what ranks compute from the same; a fault is one line with rank and parameter.

    A step is `begin`, `run` for its batch (for each of this rank's logical shards, in its block), `sync_gradients`,
    `check_gradients`, perhaps clipping, the optimizer's step, `check_update`. All of them on every rank. A fault is a
    DivergenceError on every rank; with the Synchronizer's `on_divergence="rebroadcast"` it is logged, and replicas that
    differ are made alike.

    Args:
        sync: the Synchronizer of the model.
        model: of this package's engine, whole on each rank, and with no sources of random numbers but its device's.
        optimizer: its state is compared too.
        compute: compute(batch) runs forward and backward of a batch, in micro-batches if it likes, and returns the
            loss. It may call `sync_gradients`, without `samples`; where another rank's batch is computed that does
            nothing. A batch is whatever can be pickled.
        every: steps from one audit to the next; 0: there are none.

    Attributes:
        findings: the lines of the faults that were found.

    Raises ArgumentError for models and settings whose bits depend on more than a rank's batch.
    """

    def __init__(
        self, sync: Synchronizer, model: object, optimizer: object, compute: Callable[[Any], float], every: int
    ):
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ArgumentError(f"every: expected a number of steps, 0 for no audits, got {every!r}")
        self._sync, self._comm, self._compute, self._every = sync, sync.comm, compute, every
        self.findings: list[str] = []
        self._step, self._work = 0, _Work([], False)
        self._is_due = False
        if every and sync.comm.size == 1:
            _log.warning("audit: there is no other rank to compute this one's batches; none is made")
            self._every = 0
        if not self._every:
            return
        self._ours = sync.models.of(model)
        self._space, self._flat = self._ours.space, _flat_space_of(sync, model)
        self._stream = RandomStream.of(self._flat.device)
        self._all = Bucket(0, self._space.layout.ranges, 0, self._space.layout.span)
        if self._ours.shard_mean is None:
            self._sum = self._comm.allocate_common(self._space.layout.span)
        sync.attach_optimizer(model, optimizer)

    def begin(self, step: int) -> None:
        """Begin the step of this number, the same on every rank, which decides whether it is audited."""
        self._is_due = self._every > 0 and step % self._every == 0
        if self._is_due:
            self._step, self._work = step, _Work([], self._ours.shard_mean is not None and self._comm.rank == 0)

    def run(self, batch: Any) -> float:
        """Compute this rank's batch, and return its loss."""
        if not self._is_due:
            return self._compute(batch)
        numbers, buffers = self._stream.state(), self._space.adapter.buffers()
        loss = self._compute(batch)
        self._work.parts.append(_Part(batch, numbers, buffers, loss, self._space.adapter.buffers()))
        return loss

    def check_gradients(self) -> None:
        """Compare the ranks' own gradients and their mean, in a step that is audited; collective."""
        if not self._is_due:
            return
        mean = self._ours.shard_mean
        rows = [self._space.arrays.grads] if mean is None else mean.rows
        own, sent = self._bits(self._work, rows), np.frombuffer(pickle.dumps(self._work, protocol=5), np.uint8)
        again = self._mean_again(self._step // self._every)
        is_same = np.array_equal(self._space.arrays.reduced.view(np.uint64), again.view(np.uint64))
        everyone = self._comm.all_gather(np.array([is_same, sent.size]), label=CHECKS)
        in_mean, found = "" if everyone[:, 0].all() else self._difference_of_means(again), len(self.findings)
        self._check_work(own, sent, everyone[:, 1])
        # Where a gradient has changed since it was summed, the sum is another because of it.
        if in_mean and found == len(self.findings):
            self._report(in_mean)

    def check_update(self) -> None:
        """Compare parameters and the optimizer's state, after its step, in a step that is audited; collective."""
        if self._is_due:
            self._is_due, self._work = False, _Work([], False)
            self._require_replicas(state=True)

    # --- replicas ---

    def _require_replicas(self, state: bool) -> None:
        try:
            replicas.check(self._ours, with_frozen=True, with_state=state)
        except DivergenceError as error:
            raise DivergenceError(f"audit of step {self._step}: {error}") from None

    # --- the mean ---

    def _difference_of_means(self, again: np.ndarray) -> str:
        """Return in words where the mean and the one that was summed again differ; collective."""
        comm, layout, reduced = self._comm, self._space.layout, self._space.arrays.reduced
        sums = [layout.checksums(reduced), layout.checksums(again)]
        sums.append(layout.checksums(self._mean_again(self._step // self._every + 1)))
        everyone = comm.all_gather(np.array([[*each.values()] for each in sums]), label=CHECKS)
        slot = int(np.flatnonzero((everyone != everyone[0, 0]).any((0, 1)))[0])
        shared, summed = everyone[:, 0, slot], everyone[:, 1:, slot]
        name, ranks = layout.ranges[slot].name, np.flatnonzero(shared != summed[0, 0]).tolist()
        if not ranks or (summed != summed[0, 0]).any():
            found = f"sums of {name!r} differ from one time to the next; look at the processors and memory of all ranks"
        else:
            where = ", in memory that ranks share and each may write" if comm.is_common_on_host(reduced) else ""
            found = f"{name!r} on {comm.name_ranks(ranks)} has another{where}; look at their processors and memory"
        return f"expected the mean that the ranks' gradients have when they are summed again, but {found}"

    def _mean_again(self, turn: int) -> np.ndarray:
        """Return the mean, uint8; ranks sum other parts in each turn."""
        if self._ours.shard_mean is not None:
            return self._ours.shard_mean.again(1 + turn % (self._comm.size - 1))
        own, out = self._space.arrays.grads.view(np.float32), self._sum.view(np.float32)
        cut = (1 + turn % _CUTS) * own.size // (1 + _CUTS) // _GRAIN * _GRAIN
        for part in (slice(0, cut), slice(cut, None)):
            if own[part].size:
                self._comm.all_reduce(own[part], "mean", out=out[part], label=CHECKS)
        return self._sum

    # --- a rank's own work ---

    def _check_work(self, own: Bits, sent: np.ndarray, sizes: np.ndarray) -> None:
        """Compare this rank's work with what another rank computes from the same, all ranks at once; collective.

        Args:
            own: this rank's bits.
            sent: its work as bytes, for the rank that audits it.
            sizes: the lengths of all ranks' `sent`.
        """
        comm = self._comm
        shift = 1 + self._step // self._every % (comm.size - 1)
        with self._restored():
            computed = self._computed(self._exchanged(sent, sizes, shift))
            sums = [zlib.crc32(repr(bits).encode()) for bits in (own, computed)]
            everyone = comm.all_gather(np.array(sums), label=CHECKS)
            audits = [(rank, (rank - shift) % comm.size) for rank in range(comm.size)]
            suspects = [(rank, auditor) for rank, auditor in audits if everyone[rank, 0] != everyone[auditor, 1]]
            if suspects:
                self._require_replicas(state=False)  # a parameter that differs is the cause
                self._decide(suspects, comm.all_gather_object((own, computed), label=CHECKS))

    def _exchanged(self, sent: np.ndarray, sizes: np.ndarray, shift: int) -> _Work:
        """Return the work of the rank `shift` after this one; each rank sends its own to the one before it."""
        comm, none = self._comm, np.empty(0, np.uint8)
        to, source = (comm.rank - shift) % comm.size, (comm.rank + shift) % comm.size
        received = np.empty(sizes[source], np.uint8)
        sends = [sent if rank == to else none for rank in range(comm.size)]
        comm.all_to_all(sends, [received if rank == source else none for rank in range(comm.size)], label=CHECKS)
        work: _Work = pickle.loads(received.data)
        return work

    def _computed(self, work: _Work) -> Bits:
        """Return the bits that this rank gets from a rank's batches."""
        adapter, rows, parts = self._space.adapter, [], []
        with self._sync.no_sync(), self._stream.lent() as draw_from:
            for part in work.parts:
                adapter.drop_gradients()
                draw_from(part.numbers)
                adapter.load_buffers(part.buffers)
                loss = self._compute(part.batch)
                adapter.pull_gradients(self._all)
                rows.append(self._space.arrays.grads.copy())
                parts.append(part._replace(loss=loss, buffers_after=adapter.buffers()))
        if work.is_sum:
            total = rows[0].view(np.float32)
            with np.errstate(all="ignore"):
                for row in rows[1:]:
                    total += row.view(np.float32)
            del rows[1:]
        return self._bits(_Work(parts, work.is_sum), rows)

    def _bits(self, work: _Work, rows: Sequence[np.ndarray]) -> Bits:
        """Return the hashes of gradients in the order of backward, losses, and running statistics."""
        bits, sums = Bits(), [self._space.layout.checksums(row) for row in rows]
        for place in self._space.layout.ranges:
            bits |= {(_GRADIENT, number, place.name): each[place.name] for number, each in enumerate(sums)}
        for number, part in enumerate(work.parts):
            bits[_LOSS, number, _LOSS] = int(np.float64(part.loss).view(np.uint64))
            hashes = hashes_of_arrays(part.buffers_after)
            bits |= {(_BUFFER, number, name): hashes[name] for name in hashes}
        return bits

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Let the model have its buffers and averaged gradients again after this block."""
        adapter, buffers = self._space.adapter, self._space.adapter.buffers()
        try:
            yield
        finally:
            adapter.load_buffers(buffers)
            adapter.drop_gradients()
            adapter.push_gradients(self._all)

    def _decide(self, suspects: Sequence[tuple[int, int]], everyone: Sequence[tuple[Bits, Bits]]) -> None:
        """Find out which ranks computed wrong bits, by a vote of all ranks on each rank's batch; collective.

        Args:
            suspects: ranks and their auditors, whose bits differ.
            everyone: each rank's own bits, and those of the work that it audited.
        """
        comm = self._comm
        for rank, auditor in suspects:
            found = {rank: everyone[rank][0]} | {auditor: everyone[auditor][1]}
            work = comm.broadcast_object(self._work if comm.rank == rank else None, rank, label=CHECKS)
            again = comm.all_gather_object(self._computed(work), label=CHECKS)
            votes = [sum(other == each for other in again) for each in again]
            right = again[int(np.argmax(votes))]
            expected = f"expected the same bits from every rank that computes rank {rank}'s batch"
            if 2 * max(votes) <= comm.size:
                ranks, what = comm.name_ranks(sorted(found)), _differences(found[rank], found[auditor])
                advice = "start three ranks, of which two tell" if comm.size == 2 else "look at all ranks' processors"
                self._report(f"{expected}, but {ranks} differ each time in {what}, which proves none wrong; {advice}")
                continue
            wrong = {each: bits for each, bits in found.items() if bits != right}
            lasting = {each: bits for each, bits in enumerate(again) if bits != right}
            first = next(iter((wrong | lasting).values()))
            tries = f"and {comm.name_ranks(sorted(lasting))} in the second try too" if lasting else "in one try of two"
            names, what = comm.name_ranks(sorted(wrong | lasting)), _differences(first, right)
            self._report(f"{expected}, but {names} got others in {what}, {tries}; look at processor and memory there")

    def _report(self, text: str) -> None:
        """Raise DivergenceError, or log the finding where the run is to go on; the same on every rank."""
        self.findings.append(f"audit of step {self._step}: {text}")
        if self._sync.guard.on_divergence == "raise":
            raise DivergenceError(self.findings[-1])
        if self._comm.rank == 0:
            _log.warning("%s", self.findings[-1])


def _differences(found: Bits, right: Bits) -> str:
    """Return in words what differs: the first gradient in the order of backward, and the loss if forward was wrong."""
    differing = [key for key in right if found.get(key) != right[key]]
    gradients = list(dict.fromkeys(name for kind, _, name in differing if kind == _GRADIENT))
    others = list(dict.fromkeys(name for kind, _, name in differing if kind != _GRADIENT))
    if not gradients:
        return others[0] if others[0] == _LOSS else repr(others[0])
    more = f" and {len(gradients) - 1} after it in backward" if gradients[1:] else ""
    return f"the gradient of {gradients[0]!r}{more}{', and the loss before' if _LOSS in others else ''}"


def _flat_space_of(sync: Synchronizer, model: Any) -> FlatSpace:
    """Return a model's flat space; ArgumentError for models and settings whose bits cannot be computed elsewhere."""
    ours = sync.models.of(model)
    flat = ours.space.flat_space
    if flat is None:
        raise ArgumentError(f"audit: expected a model of clcomm.engine, got {type(model).__name__}")
    ranks = ModelRanks.of(ours.space)
    refused = {
        "a DistributedOptimizer": ours.sharded_update is not None,
        "compression, algorithm, combination or hook": sync.models.hook is not None,
        "policy": sync.models.settings.policy is not None,
        "layers that ranks divide": ranks.part is not None or ranks.stages is not None,
        "layers with a RandomStream of their own": any(
            isinstance(getattr(layer, "stream", None), RandomStream) for _, layer in model.named_modules()
        ),
    }
    for what in (what for what, is_given in refused.items() if is_given):
        raise ArgumentError(f"audit: expected no {what}, whose bits no other rank can compute, got some; leave it out")
    refuse_mixing(ours.space, "audit", "whose statistics are of all ranks at once")
    return flat
