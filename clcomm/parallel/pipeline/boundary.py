"""The boundary between two stages: the slots of its channels as tensors, which kernels read and write in place.

On a device that shares the host's memory a tensor lies on top of its slot. The stage before the boundary copies its
result there, the stage behind it reads it in place until its backward has run, and backward writes the gradient into
the slot of the way back. On other devices slots are staging memory, which is copied to and from the device.
"""

from __future__ import annotations

import numpy as np

from clcomm.engine.device import Device
from clcomm.engine.tensor import FLOAT32, Shape, Tensor, copy_into, empty, wrap
from clcomm.parallel.pipeline.channels import Receiver, Sender


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
