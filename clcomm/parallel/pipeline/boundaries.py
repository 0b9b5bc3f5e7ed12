"""All boundaries of a pipeline for one shape of micro-batches: the arrays that pass, and their channels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from clcomm.base.errors import ClcommError
from clcomm.base.schedules.pipeline import PipelineSchedule
from clcomm.comm.communicator import Communicator
from clcomm.engine.device import Device
from clcomm.engine.modes import no_grad
from clcomm.engine.nn.module import Module, evaluating
from clcomm.engine.tensor import FLOAT32, Shape, Tensor
from clcomm.parallel.pipeline.boundary import Inbox, Outbox
from clcomm.parallel.pipeline.channels import ChannelPlan, open_channels
from clcomm.parallel.pipeline.stage import Stage

#: The labels under which messages are counted.
ACTIVATIONS, GRADIENTS = "activations", "activation gradients"
_SHAPES = "shapes"


class Passing(NamedTuple):
    """A stage's output for a micro-batch: shape, and dtype as text."""

    shape: Shape
    dtype: str


class Boundaries:
    """This rank's ends of all boundaries, by stage; collective.

    Args:
        passing: the output of each stage but the last.

    Attributes:
        inputs: the activations that a stage receives.
        outputs: the activations that it sends.
        gradients: the gradients of its outputs, which it receives.
        input_gradients: the gradients of its inputs, which it sends.
        nbytes: of all slots on this rank.
    """

    def __init__(self, comm: Communicator, device: Device, schedule: PipelineSchedule, passing: list[Passing]):
        self.inputs: dict[int, Inbox] = {}
        self.outputs: dict[int, Outbox] = {}
        self.gradients: dict[int, Inbox] = {}
        self.input_gradients: dict[int, Outbox] = {}
        plans, names = [], []
        for stage, (shape, dtype) in enumerate(passing):
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            here, there = schedule.rank_of(stage), schedule.rank_of(stage + 1)
            slots = schedule.slots
            plans.append(ChannelPlan(here, there, nbytes, slots[stage + 1].activations, ACTIVATIONS))
            names.append((stage, True))
            if np.dtype(dtype) == FLOAT32:  # indices have no gradient
                plans.append(ChannelPlan(there, here, nbytes, slots[stage].gradients, GRADIENTS))
                names.append((stage, False))
        for (stage, is_forward), ends in zip(names, open_channels(comm, plans), strict=True):
            shape, kind = passing[stage].shape, np.dtype(passing[stage].dtype)
            name = f"{ACTIVATIONS if is_forward else GRADIENTS} of stage {stage}"
            outboxes, to = (self.outputs, stage) if is_forward else (self.input_gradients, stage + 1)
            inboxes, at = (self.inputs, stage + 1) if is_forward else (self.gradients, stage)
            if ends.sender is not None:
                outboxes[to] = Outbox(ends.sender, device, shape, kind, name)
            if ends.receiver is not None:
                inboxes[at] = Inbox(ends.receiver, device, shape, kind, name)
        own = [plan for plan in plans if comm.rank in (plan.sender, plan.receiver)]
        self.nbytes = sum(plan.nbytes * plan.slots for plan in own)

    @property
    def held_bytes(self) -> int:
        return sum(each.held_bytes for each in (*self.inputs.values(), *self.gradients.values()))


def find_passing(
    comm: Communicator,
    device: Device,
    schedule: PipelineSchedule,
    stages: Mapping[int, Stage],
    part: Module,
    first: Passing,
) -> list[Passing]:
    """Return the output of each stage but the last; collective. Each stage runs once on zeros, as in evaluation.

    Args:
        stages: this rank's, by number.
        part: the module that holds their parameters.
        first: a micro-batch of the pipeline's inputs.

    Raises a stage's error for its input on every rank.
    """
    passing: list[Passing] = []
    for number in range(schedule.stages - 1):
        given = passing[-1] if passing else first
        owner = schedule.rank_of(number)
        found: Passing | ClcommError | None = None
        if comm.rank == owner:
            found = _handed_on(stages[number], part, device, given)
        found = comm.broadcast_object(found, owner, label=_SHAPES)
        if isinstance(found, ClcommError):
            raise type(found)(f"stage {number}: {found}")
        assert found is not None
        passing.append(found)
    return passing


def _handed_on(stage: Stage, part: Module, device: Device, given: Passing) -> Passing | ClcommError:
    try:
        with no_grad(), evaluating(part):
            y = stage(Tensor(np.zeros(given.shape, given.dtype), device))
    except ClcommError as error:
        return error
    return Passing(tuple(y.shape), y.dtype.str)
