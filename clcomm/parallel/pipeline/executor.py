"""Runs a schedule's actions on one rank, forwards, backwards and the messages between stages, and times them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import NamedTuple

import numpy as np

from clcomm.base.errors import ClcommError
from clcomm.base.schedules.pipeline import Action, PipelineSchedule
from clcomm.comm.communicator import Communicator
from clcomm.engine.device import Device
from clcomm.engine.modes import no_grad
from clcomm.engine.nn.module import Module
from clcomm.engine.tensor import Tensor, copy_into, empty, wrap
from clcomm.parallel.pipeline.batches import MicroBatches
from clcomm.parallel.pipeline.link import ACTIVATIONS, GRADIENTS, Links, Slot
from clcomm.parallel.pipeline.stage import run_layers

#: The names of the phases.
FORWARD, BACKWARD = "forward", "backward"
Loss = Callable[[Tensor, Tensor], Tensor]
#: The most steps that are remembered.
MOST_STEPS = 1000


class Batch(NamedTuple):
    """A batch in micro-batches: the first stage's inputs and the last one's targets; None where they are not needed."""

    inputs: MicroBatches | None
    targets: MicroBatches | None


class Bubble(NamedTuple):
    """The share of the ranks' time without computing.

    Attributes:
        measured: over all ranks and steps: 1 - computing / (ranks x time from the step's begin to its last action).
        formula: for stages that take equally long, and messages that take no time.
        steps: number of measured steps.
    """

    measured: float
    formula: float
    steps: int

    def __str__(self) -> str:
        return f"bubble {self.measured:.1%} measured over {self.steps} steps, {self.formula:.1%} by the formula"


class Executor:
    """Runs the stages of one rank.

    Args:
        stages: the layers of each, by number.

    Attributes:
        peak_bytes: the most bytes of activations that this rank has kept at once: those that forwards kept for their
            backwards, and unreleased received ones.
        steps: of the latest steps, the time from the begin, of all ranks, to this rank's last action, and its computing
            in it.
    """

    def __init__(
        self,
        comm: Communicator,
        device: Device,
        schedule: PipelineSchedule,
        stages: Mapping[int, Sequence[Module]],
        loss: Loss,
    ):
        self._comm, self._device, self._schedule, self._stages = comm, device, schedule, stages
        self._loss, self._actions, self._last = loss, schedule.actions[comm.rank], schedule.stages - 1
        self._final = {*{each.stage: each for each in self._actions if not each.is_forward}.values()}  # of each stage
        self._alive: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # inputs and results of forwards
        self._base_bytes = 0
        self._is_running = False
        self._last_end_s = self._computing_s = 0.0
        self.peak_bytes = 0
        self.steps: deque[tuple[float, float]] = deque(maxlen=MOST_STEPS)

    def train(
        self,
        links: Links,
        batch: Batch,
        accumulate: Callable[[], AbstractContextManager[object]] = nullcontext,
        weight: float = 1.0,
    ) -> list[float]:
        """Run all forwards and backwards; return the losses of the micro-batches on the last stage's rank.

        accumulate: returns a context for each backward of a stage but its last. weight: of the gradients.
        """
        began_s, losses = perf_counter(), list[Tensor]()
        with self._running(links, links.received):
            for action in self._actions:
                if action.is_forward:
                    losses += self._forward(links, batch, action)
                else:
                    with nullcontext() if action in self._final else accumulate():
                        self._backward(links, action, weight)
        self.steps.append((self._last_end_s - began_s, self._computing_s))
        return [float(each.item()) for each in losses]

    def evaluate(self, links: Links, batch: Batch) -> list[Tensor]:
        """Run all forwards; return the last stage's results, or losses where there are targets, on its rank."""
        results = list[Tensor]()
        with self._running(links, [key for key in links.received if key[0] == ACTIVATIONS]), no_grad():
            for action in self._actions:
                if action.is_forward:
                    results += self._forward(links, batch, action)
                    del self._alive[action.stage, action.micro_batch]
                    if action.stage:
                        links.received[ACTIVATIONS, action.stage - 1].give()
        return results

    @contextmanager
    def _running(self, links: Links, receiving: Iterable[tuple[str, int]]) -> Iterator[None]:
        """Begin a step that receives from these links, and end it; one that fails leaves messages over."""
        if self._is_running:
            raise ClcommError(
                "pipeline: expected the step before to have ended, but it failed, so that messages are left over; "
                "make another Pipeline"
            )
        self._is_running = True
        self._alive.clear()
        self._computing_s, self._base_bytes = 0.0, self._device.active_bytes
        for key in receiving:
            links.received[key].expect(self._schedule.micro_batches)
        yield
        for end in links.sent.values():
            end.complete()
        self._is_running = False

    @contextmanager
    def _computing(self, action: Action) -> Iterator[None]:
        """Time what an action computes, until the device has done it."""
        name, stage, number = FORWARD if action.is_forward else BACKWARD, action.stage, action.micro_batch
        began_s = perf_counter()
        with self._comm.phase(name, f"stage {stage}", stage=stage, **{"micro-batch": number}):
            yield
            self._device.finish()
        self._last_end_s = perf_counter()
        self._computing_s += self._last_end_s - began_s

    def _forward(self, links: Links, batch: Batch, action: Action) -> list[Tensor]:
        """Run a stage on a micro-batch, and send the result on; return it for the last stage, with targets the loss."""
        number, m, _ = action
        source, target = links.received.get((ACTIVATIONS, number - 1)), links.sent.get((ACTIVATIONS, number))
        assert source or batch.inputs, "the first stage without inputs"
        x: Tensor = source.take(m) if source else batch.inputs[m]  # type: ignore[index]
        slot = None if target is None else target.take(m)
        with self._computing(action):
            y = run_layers(self._stages[number], x)
            if number == self._last and batch.targets is not None:
                y = self._loss(y, batch.targets[m])
            if slot is not None:
                slot.put(y)
        self._alive[number, m] = x, y
        kept = self._device.active_bytes - self._base_bytes + links.held_bytes
        self.peak_bytes = max(self.peak_bytes, kept)
        if target is None:
            return [self._lasting(y, x)]
        target.give()
        if y._node is not None:  # backward begins at it: only an operation that kept the values needs them
            ending = wrap(y.device, None, y.shape, y.dtype)
            ending._node, ending._requires_grad = y._node, True
            self._alive[number, m] = x, ending
        return []

    def _lasting(self, y: Tensor, x: Tensor) -> Tensor:
        """Return a result in lasting memory: a stage that passes its input on returns memory of a slot."""
        if y.buffer is not x.buffer:
            return y
        copied = empty(y.device, y.shape, y.dtype)
        copy_into(copied, y)
        self._device.finish()
        return copied

    def _backward(self, links: Links, action: Action, weight: float) -> None:
        """Add a micro-batch's gradients to a stage's parameters, and send its input's gradient."""
        number, m, _ = action
        x, y = self._alive.pop((number, m))
        source, target = links.received.get((GRADIENTS, number)), links.sent.get((GRADIENTS, number - 1))
        gradient = weight / self._schedule.micro_batches if source is None else source.take(m)
        slot = None if target is None else target.take(m)
        if isinstance(x, Slot):
            x.gradient_slot = slot
        with self._computing(action):
            if y.requires_grad and (source is not None or number == self._last):
                y.backward(gradient)
            if slot is not None:
                slot.put(x.grad)
        if target is not None:
            x.grad = None
            target.give()
        if source is not None:
            source.give()
        if number:
            links.received[ACTIVATIONS, number - 1].give()

    def bubble(self) -> Bubble:
        """Return the bubble of the remembered steps, NaN if there were none; collective."""
        own, formula = np.array(self.steps, np.float64).reshape(-1, 2), self._schedule.bubble
        if not len(own):
            return Bubble(float("nan"), formula, 0)
        everyone = self._comm.all_gather(own, label="times")
        spans, computing = everyone[:, :, 0].max(axis=0).sum(), everyone[:, :, 1].sum()
        return Bubble(float(1 - computing / (self._comm.size * spans)), formula, len(own))
