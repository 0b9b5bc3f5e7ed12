"""Runs a schedule's actions on one rank, forwards, backwards and the messages between stages, and times them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import NamedTuple

import numpy as np

from clcomm.base.errors import ClcommError
from clcomm.base.schedules.pipeline import Action, PipelineSchedule
from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.events import TimedPhase
from clcomm.engine.device import Device
from clcomm.engine.modes import no_grad
from clcomm.engine.tensor import Tensor, copy_into, empty, wrap
from clcomm.parallel.pipeline.boundary import Arrived, Boundaries, Inbox, MicroBatches
from clcomm.parallel.pipeline.stage import Stage

#: The names of the phases.
FORWARD, BACKWARD = "forward", "backward"
Loss = Callable[[Tensor, Tensor], Tensor]
#: The most steps that are remembered.
MOST_STEPS = 1000
_TIMES = "times"


class Batch(NamedTuple):
    """A batch in micro-batches: the first stage's inputs and the last one's targets; None where they are not needed."""

    inputs: MicroBatches | None
    targets: MicroBatches | None


class Executor:
    """Runs the stages of one rank.

    Attributes:
        turns: the begin and end of this rank's actions in the last step, by time.perf_counter(), in order.
        peak_bytes: the most bytes of activations that this rank has kept at once: those that forwards kept for their
            backwards, and unreleased received ones.
    """

    def __init__(
        self, comm: Communicator, device: Device, schedule: PipelineSchedule, stages: Mapping[int, Stage], loss: Loss
    ):
        self._comm, self._device, self._schedule, self._stages = comm, device, schedule, stages
        self._loss = loss
        self._last = schedule.stages - 1
        own = [action for action in schedule.actions[comm.rank] if not action.is_forward]
        self._final = {*{action.stage: action for action in own}.values()}  # the last backward of each stage
        self._alive: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # inputs and results of forwards
        self._base_bytes = 0
        self._is_running = False
        self.turns: list[tuple[Action, float, float]] = []
        self.peak_bytes = 0

    # --- a step ---

    def train(
        self,
        boundaries: Boundaries,
        batch: Batch,
        accumulate: Callable[[], AbstractContextManager[object]] = nullcontext,
        weight: float = 1.0,
    ) -> list[float]:
        """Run all forwards and backwards; return the losses of the micro-batches on the last stage's rank.

        accumulate: returns a context for each backward of a stage but its last. weight: of the gradients.
        """
        losses: list[Tensor] = []
        self._begin([*boundaries.inputs.values(), *boundaries.gradients.values()])
        for action in self._schedule.actions[self._comm.rank]:
            if action.is_forward:
                y = self._forward(boundaries, batch, action)
                if action.stage == self._last:
                    losses.append(self._kept(y, action))
            else:
                with nullcontext() if action in self._final else accumulate():
                    self._backward(boundaries, action, weight)
        self._end(boundaries)
        return [float(each.item()) for each in losses]

    def evaluate(self, boundaries: Boundaries, batch: Batch) -> list[Tensor]:
        """Run all forwards; return the last stage's results, or losses where there are targets, on its rank."""
        results: list[Tensor] = []
        self._begin(boundaries.inputs.values())
        with no_grad():
            for action in self._schedule.actions[self._comm.rank]:
                if action.is_forward:
                    y = self._forward(boundaries, batch, action)
                    if action.stage == self._last:
                        results.append(self._kept(y, action))
                    del self._alive[action.stage, action.micro_batch]
                    if action.stage:
                        boundaries.inputs[action.stage].release()
        self._end(boundaries)
        return results

    def _begin(self, receiving: Iterable[Inbox]) -> None:
        if self._is_running:
            raise ClcommError(
                "pipeline: expected the step before to have ended, but it failed, so that messages are left over; "
                "make another Pipeline"
            )
        self._is_running = True
        self._alive.clear()
        self.turns = []
        self._base_bytes = self._device.active_bytes
        for inbox in receiving:
            inbox.expect(self._schedule.micro_batches)

    def _end(self, boundaries: Boundaries) -> None:
        for outbox in (*boundaries.outputs.values(), *boundaries.input_gradients.values()):
            outbox.complete()
        self._is_running = False

    def _kept(self, y: Tensor, action: Action) -> Tensor:
        """Return a result in lasting memory: a stage that passes its input on returns memory of a slot."""
        x, _ = self._alive[action.stage, action.micro_batch]
        if y.buffer is not x.buffer:
            return y
        copied = empty(y.device, y.shape, y.dtype)
        copy_into(copied, y)
        self._device.finish()
        return copied

    # --- actions ---

    def _forward(self, boundaries: Boundaries, batch: Batch, action: Action) -> Tensor:
        """Run a stage on a micro-batch, send the result on, and return it; for the last stage with targets the loss."""
        number, m, _ = action
        x: Tensor
        if number:
            x = boundaries.inputs[number].receive(m)
        else:
            assert batch.inputs is not None, "the first stage without inputs"
            x = batch.inputs[m]
        outbox = boundaries.outputs.get(number)
        slot = None if outbox is None else outbox.reserve(m)
        began_s = perf_counter()
        with self._phase(FORWARD, number, m):
            y = self._stages[number](x)
            if number == self._last and batch.targets is not None:
                y = self._loss(y, batch.targets[m])
            if slot is not None:
                slot.put(y)
            self._device.finish()
        self.turns.append((action, began_s, perf_counter()))
        self._alive[number, m] = x, y
        self._note_peak(boundaries)
        if outbox is not None:
            outbox.send()
            if y._node is not None:  # backward begins at it: only an operation that kept the values needs them
                ending = wrap(y.device, None, y.shape, y.dtype)
                ending._node, ending._requires_grad = y._node, True
                self._alive[number, m] = x, ending
        return y

    def _backward(self, boundaries: Boundaries, action: Action, weight: float) -> None:
        """Add a micro-batch's gradients to a stage's parameters, and send its input's gradient."""
        number, m, _ = action
        x, y = self._alive.pop((number, m))
        inbox, outbox = boundaries.gradients.get(number), boundaries.input_gradients.get(number)
        gradient: Tensor | float = weight / self._schedule.micro_batches
        if inbox is not None:
            gradient = inbox.receive(m)
        slot = None if outbox is None else outbox.reserve(m)
        if slot is not None and isinstance(x, Arrived):
            x.gradient_place = None if slot.is_staged else slot.tensor
        began_s = perf_counter()
        with self._phase(BACKWARD, number, m):
            if y.requires_grad and (inbox is not None or number == self._last):
                y.backward(gradient)
            if slot is not None:
                slot.put(x.grad)
            self._device.finish()
        self.turns.append((action, began_s, perf_counter()))
        if outbox is not None:
            x.grad = None
            outbox.send()
        if inbox is not None:
            inbox.release()
        if number:
            boundaries.inputs[number].release()

    def _phase(self, name: str, stage: int, micro_batch: int) -> TimedPhase:
        return self._comm.phase(name, f"stage {stage}", stage=stage, **{"micro-batch": micro_batch})

    def _note_peak(self, boundaries: Boundaries) -> None:
        kept = self._device.active_bytes - self._base_bytes + boundaries.held_bytes
        self.peak_bytes = max(self.peak_bytes, kept)


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


class StepTimes:
    """Each step's span on this rank, from when all ranks began to this rank's last action, and its computing in it."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=MOST_STEPS)

    def add(self, began_s: float, turns: Sequence[tuple[Action, float, float]]) -> None:
        self._steps.append((turns[-1][2] - began_s, sum(end - begin for _, begin, end in turns)))

    def reset(self) -> None:
        self._steps.clear()

    def bubble(self, comm: Communicator, formula: float) -> Bubble:
        """Return the bubble of the steps since the last reset, NaN if there were none; collective."""
        own = np.array(self._steps, np.float64).reshape(-1, 2)
        if not len(own):
            return Bubble(float("nan"), formula, 0)
        everyone = comm.all_gather(own, label=_TIMES)
        spans, computing = everyone[:, :, 0].max(axis=0).sum(), everyone[:, :, 1].sum()
        return Bubble(float(1 - computing / (comm.size * spans)), formula, len(own))
