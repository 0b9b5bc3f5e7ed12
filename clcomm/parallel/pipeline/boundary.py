"""The boundary between two stages: the slots of its channels as tensors, which kernels read and write in place.

On a device that shares the host's memory a tensor lies on top of its slot. The stage before the boundary copies its
result there, the stage behind it reads it in place until its backward has run, and backward writes the gradient into
the slot of the way back. On other devices slots are staging memory, which is copied to and from the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError, ClcommError, MismatchError
from clcomm.base.schedules.pipeline import PipelineSchedule
from clcomm.comm.communicator import Communicator
from clcomm.engine.device import Device
from clcomm.engine.modes import no_grad
from clcomm.engine.nn.module import Module, evaluating
from clcomm.engine.tensor import FLOAT32, Shape, Tensor, copy_into, empty, wrap
from clcomm.parallel.pipeline.channels import ChannelPlan, Receiver, Sender, open_channels
from clcomm.parallel.pipeline.stage import Stage
from clcomm.sync.agreement import CHECKS, digest


class Arrived(Tensor):
    """A leaf of the tape: a stage's input. Its gradient is written to `gradient_place`; None: to new memory."""

    __slots__ = ("gradient_place",)

    gradient_place: Tensor | None

    @classmethod
    def on(cls, tensor: Tensor) -> Arrived:
        """Return a leaf on the memory of a tensor."""
        leaf = cls.__new__(cls)
        leaf.device, leaf.buffer, leaf.shape, leaf.dtype = tensor.device, tensor.buffer, tensor.shape, tensor.dtype
        leaf._grad = leaf._node = leaf._hooks = leaf.gradient_place = None
        leaf._requires_grad, leaf.whole_columns = tensor.dtype == FLOAT32, tensor.whole_columns
        return leaf

    def claim_gradient(self) -> Tensor | None:
        if self._grad is not None:
            return None
        self._grad = empty(self.device, self.shape) if self.gradient_place is None else self.gradient_place
        return self._grad


class SlotTensor:
    """A slot of a channel as a tensor.

    Attributes:
        tensor: on top of the slot, or in the device's memory.
        is_staged: whether it is in the device's memory.
    """

    def __init__(self, device: Device, memory: np.ndarray, shape: Shape, dtype: np.dtype):
        self._array = memory.view(dtype).reshape(shape)
        self._device = device
        buffer = device.upload(self._array, copy=False) if device.shares_host_memory else None
        self.is_staged = buffer is None or not device.lies_on(self._array, buffer)
        self.tensor = empty(device, shape, dtype) if self.is_staged else wrap(device, buffer, shape, dtype)

    def fetch(self) -> None:
        """Bring a staged tensor up to date with the slot."""
        if self.is_staged:
            self._device.write(self.tensor.buffer, self._array)

    def put(self, tensor: Tensor | None) -> None:
        """Queue the update of the slot from a tensor, unless that lies on it; None: zeros.

        A staged slot waits for the queue; others are up to date once the queue is finished.
        """
        if tensor is None:
            self._array[...] = 0  # no kernel in the queue writes to it
        elif self.is_staged:
            self._device.read(tensor.buffer, self._array)
        elif tensor.buffer is not self.tensor.buffer:
            copy_into(self.tensor, tensor)


class Inbox:
    """Tensors that a stage receives.

    Args:
        name: in messages, such as "activations of stage 2".

    Attributes:
        held_bytes: bytes of unreleased tensors.
    """

    def __init__(self, receiver: Receiver, device: Device, shape: Shape, dtype: np.dtype, name: str):
        self._receiver, self._name = receiver, name
        self._slots = [SlotTensor(device, memory, shape, dtype) for memory in receiver.slots]
        self._leaves = [Arrived.on(slot.tensor) for slot in self._slots]
        self.held_bytes = 0

    def expect(self, count: int) -> None:
        self._receiver.expect(count)

    def receive(self, micro_batch: int) -> Arrived:
        """Return the next tensor as a leaf, once it has arrived; it stays until it is released."""
        index = self._receiver.receive(f"{self._name}, micro-batch {micro_batch},")
        slot, leaf = self._slots[index], self._leaves[index]
        slot.fetch()
        self.held_bytes += leaf.nbytes
        return leaf

    def release(self) -> None:
        self.held_bytes -= self._leaves[0].nbytes
        self._receiver.release()


class Outbox:
    """Tensors that a stage sends; the arguments are those of an Inbox."""

    def __init__(self, sender: Sender, device: Device, shape: Shape, dtype: np.dtype, name: str):
        self._sender, self._name = sender, name
        self._slots = [SlotTensor(device, memory, shape, dtype) for memory in sender.slots]

    def reserve(self, micro_batch: int) -> SlotTensor:
        return self._slots[self._sender.reserve(f"{self._name}, micro-batch {micro_batch},")]

    def send(self) -> None:
        self._sender.send()

    def complete(self) -> None:
        self._sender.complete()


# --- All boundaries of a pipeline for one shape of micro-batches: the arrays that pass, and their channels. ---

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


# --- Batches of a pipeline: compared between the ranks, and cut into micro-batches. ---

#: Shape and dtype of a batch; None: this rank has none.
Form = tuple[Shape, str] | None
#: Bounds the memory for different batches.
_MOST_FORMS = 256


class BatchCheck:
    """Compares the ranks' batches, by hashes alone once a kind of batch has passed."""

    def __init__(self, comm: Communicator, micro_batches: int):
        self._comm, self._micro_batches = comm, micro_batches
        self._agreed: dict[bytes, tuple[Shape, str]] = {}

    def agreed(self, inputs: object, targets: object, *, needs_targets: bool, refusal: str = "") -> tuple[Shape, str]:
        """Return shape and dtype of the pipeline's inputs; collective.

        Args:
            refusal: the reason why this rank cannot go on.

        Raises:
            ArgumentError: a rank has a refusal, the first rank has no inputs or the last one no targets, or the batch
                cannot be cut; on every rank.
            MismatchError: ranks that have inputs, or targets, have different ones; on every rank.
        """
        own = _form("inputs", inputs), _form("targets", targets)
        said = repr((own, needs_targets, refusal)).encode()
        rows = self._comm.all_gather(np.frombuffer(digest(said), np.uint8), label=CHECKS)
        key = rows.tobytes()
        if key not in self._agreed:
            if len(self._agreed) >= _MOST_FORMS:
                self._agreed.clear()
            everyone = self._comm.all_gather_object((*own, needs_targets, refusal), label=CHECKS)
            self._agreed[key] = self._checked(everyone)
        return self._agreed[key]

    def _checked(self, everyone: Sequence[tuple[Form, Form, bool, str]]) -> tuple[Shape, str]:
        for rank, each in enumerate(everyone):
            if each[3]:
                raise ArgumentError(f"{each[3]}, on {self._comm.name_ranks([rank])}")
        if len({each[2] for each in everyone}) > 1:
            training = [rank for rank, each in enumerate(everyone) if each[2]]
            raise MismatchError(
                f"pipeline: expected the same call on every rank, got one with targets on "
                f"{self._comm.name_ranks(training)} alone"
            )
        for index, name in ((0, "inputs"), (1, "targets")):
            known = {rank: each[index] for rank, each in enumerate(everyone) if each[index] is not None}
            if len(set(known.values())) > 1:
                text = "; ".join(f"{form} on {self._comm.name_ranks([rank])}" for rank, form in known.items())
                raise MismatchError(
                    f"{name}: expected the same shape and dtype on every rank that has them, got {text}"
                )
        first, last, needs_targets = everyone[0][0], everyone[-1][1], everyone[0][2]
        if first is None:
            raise ArgumentError(f"inputs: expected an array on {self._comm.name_ranks([0])}, got None")
        if needs_targets and last is None:
            raise ArgumentError(f"targets: expected an array on {self._comm.name_ranks([len(everyone) - 1])}, got None")
        size = first[0][0]
        if size % self._micro_batches:
            raise ArgumentError(
                f"inputs: expected a batch that {self._micro_batches} micro-batches divide, got {size} samples"
            )
        if last is not None and last[0][0] != size:
            raise ArgumentError(f"targets: expected {size}, one for each input, got {last[0][0]}")
        return first


class MicroBatches:
    """A batch in parts of equal size, each brought to the device when it is needed."""

    def __init__(self, values: Any, count: int, device: Device):
        if isinstance(values, Tensor) and values.dtype == np.int32:  # the engine takes parts of float32 alone
            values = values.numpy()
        self._values, self._size, self._device = values, values.shape[0] // count, device

    def __getitem__(self, number: int) -> Tensor:
        part = self._values[number * self._size : (number + 1) * self._size]
        return part if isinstance(part, Tensor) else Tensor(part, self._device)


def _form(name: str, values: object) -> Form:
    if values is None:
        return None
    if not isinstance(values, (np.ndarray, Tensor)) or not values.ndim or not values.shape[0]:
        got = f"shape {values.shape}" if hasattr(values, "shape") else type(values).__name__
        raise ArgumentError(f"{name}: expected an array or a Tensor of samples, got {got}")
    is_whole = values.dtype.kind in "iu"
    return tuple(values.shape), np.dtype(np.int32 if is_whole else np.float32).str
