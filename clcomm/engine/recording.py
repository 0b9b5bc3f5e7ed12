"""Recordings: the launches of one run of a function, their memory planned, ready to be queued again.

While a device has a Recorder, every launch and allocation is noted as it happens; the run itself is an ordinary one.
A buffer of that run becomes one of four things: planned memory in the arena, an input or a result (other memory at
each run, so these arguments are set anew), or something that was there before and stays (parameters, gradients).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from clcomm.engine import arena, program
from clcomm.engine.tensor import Tensor, wrap

if TYPE_CHECKING:
    from clcomm.engine.device import Device
    from clcomm.engine.flat import FlatSpace
    from clcomm.engine.grad_slot import GradSlot
    from clcomm.engine.surroundings import Surroundings

Results = Tensor | tuple[Tensor, ...] | None
States = dict["FlatSpace", list[int]]


class Block:
    """Memory allocated in the run; `owner` is the buffer as long as anything else refers to it."""

    def __init__(self, owner: Any, nbytes: int):
        self.owner, self.nbytes = owner, nbytes
        self.first = self.last = -1

    def is_dropped(self) -> bool:
        return sys.getrefcount(self.owner) <= _OWNED_ALONE


_OWNED_ALONE = (lambda block: sys.getrefcount(block.owner))(Block(object(), 0))


class Launch:
    def __init__(self, kernel: Any, sizes: tuple[Any, Any], args: list[Any]):
        self.kernel, self.sizes, self.args = kernel, sizes, args


class Part:
    """Launches, the gradient slots' states after them, and then what has to run on the host."""

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.states: list[tuple[GradSlot, int]] = []
        self.function: Callable[..., Any] | None = None
        self.args: tuple[Any, ...] = ()


class Recorder:
    """Notes what one run of a function does on a device; `reason` says why it can't be replayed, if so."""

    def __init__(self, device: Device, inputs: Sequence[Tensor]):
        self.device = device
        self.reason: str | None = None
        self.revision = device.revision
        self.parts = [Part()]
        self.before: States = {}
        self._latest: States = {}
        self.inputs = {tensor.buffer.int_ptr: index for index, tensor in enumerate(inputs)}
        self.blocks: dict[int, Block] = {}  # by address, while their memory is in use
        self._count = 0

    def refuse(self, reason: str) -> None:
        """Note the first reason why this run can't be replayed."""
        self.reason = self.reason or reason

    def allocate(self, nbytes: int) -> Any:
        """Return a pooled buffer, maybe one whose last reference was dropped before."""
        self.drop_unused()
        buffer = self.device.memory.allocate(nbytes)
        self.blocks[buffer.int_ptr] = Block(buffer, nbytes)
        return buffer

    def drop_unused(self) -> None:
        """Give memory that nobody refers to any longer back to the pool."""
        for address in [address for address, block in self.blocks.items() if block.is_dropped()]:
            self.blocks.pop(address).owner = None

    def launch(self, kernel: Any, sizes: tuple[Any, Any], args: Iterable[Any]) -> None:
        """Note a launch."""
        noted: list[Any] = []
        for arg in args:
            address = getattr(arg, "int_ptr", None)
            block = self.blocks.get(address) if address is not None else None
            if block is not None:
                block.first = self._count if block.first < 0 else block.first
                block.last = self._count
                noted.append(block)
            elif address in self.inputs:
                noted.append(Input(self.inputs[address]))
            else:
                noted.append(arg)
        self.parts[-1].launches.append(Launch(kernel, sizes, noted))
        self._count += 1

    def slots_used(self, space: FlatSpace) -> None:
        """Note the states of a flat space's slots before the first of them changes."""
        if space not in self.before:
            self.before[space] = self._latest[space] = [slot.state for slot in space.slots]

    def on_host(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Run `function`, and note that each replay has to at this point; what it queues is its own affair."""
        part = self._close_part()
        part.function, part.args = function, args
        self.device.recorder = None
        try:
            function(*args)
        finally:
            self.device.recorder = self
        for space in self._latest:
            self._latest[space] = [slot.state for slot in space.slots]
        self.parts.append(Part())

    def _close_part(self) -> Part:
        self.drop_unused()
        part = self.parts[-1]
        for space, latest in self._latest.items():
            pairs = zip(space.slots, latest, strict=True)
            part.states += [(slot, slot.state) for slot, state in pairs if slot.state != state]
        return part

    def finish(self, results: Any) -> None:
        """Note the end of the run: its results, which alone may outlive it."""
        self._close_part()
        if self.device.revision != self.revision:
            self.refuse("memory, hooks or requires_grad of some tensor changed in it")
        tensors = as_tensors(results)
        if tensors is None:
            self.refuse(f"it returns {type(results).__name__}, not None, a tensor or a tuple of tensors")
            return
        kept = self.blocks.keys() - {tensor.buffer.int_ptr for tensor in tensors}
        if kept:
            self.refuse("it leaves a tensor behind that it does not return")


class Input(int):
    """Which of the inputs an argument is."""


def as_tensors(results: Any) -> tuple[Tensor, ...] | None:
    """Return a function's results as a tuple, or None when they are anything but tensors."""
    if results is None:
        return ()
    tensors = results if isinstance(results, tuple) else (results,)
    return tensors if all(isinstance(tensor, Tensor) for tensor in tensors) else None


class Recording:
    """What a finished Recorder noted, with memory planned in `nbytes` of arena.

    surroundings: the Python values that it holds for. runs: how often it was queued again. next_check: at how many runs
    the function is to be compared with it. constants: by address, what buffers of the device's hold.
    """

    def __init__(self, recorder: Recorder, results: Results, surroundings: Surroundings | None = None):
        self.device = recorder.device
        self.surroundings = surroundings
        self.runs = self.next_check = 0
        self.launch_count = sum(len(part.launches) for part in recorder.parts)
        self._revision = recorder.revision
        self._before = list(recorder.before.items())
        self.parts = recorder.parts
        self._bound: list[tuple[list[Any], Any, Any, Any]] = []
        self._is_tuple, tensors = isinstance(results, tuple), as_tensors(results) or ()
        self.results = [(t.shape, t.dtype, self._source(recorder, t.buffer)) for t in tensors]
        returned = {id(source) for *_, source in self.results}
        noted = [arg for part in recorder.parts for launch in part.launches for arg in launch.args]
        blocks = {id(arg): arg for arg in noted if isinstance(arg, Block) and id(arg) not in returned}
        kept = {buffer.int_ptr: key for key, buffer in self.device.kept.items()}
        addresses = {getattr(arg, "int_ptr", None) for arg in noted}
        self.constants = {address: key for address, key in kept.items() if address in addresses}
        self._planned = list(blocks.values())
        for block in recorder.blocks.values():
            block.owner = None
        lifetimes = [arena.Lifetime(block.nbytes, block.first, block.last) for block in self._planned]
        self._offsets, self.nbytes = arena.plan(lifetimes, self.device.buffer_alignment)
        self.release()

    @staticmethod
    def _source(recorder: Recorder, buffer: Any) -> Any:
        address = buffer.int_ptr
        if address in recorder.blocks:
            return recorder.blocks[address]
        return Input(recorder.inputs[address]) if address in recorder.inputs else buffer

    def release(self) -> None:
        """Let go of the arena, and give the kernel objects back that were made for it."""
        for part, (launches, *_) in zip(self.parts, self._bound, strict=False):
            for launch, (kernel, *_) in zip(part.launches, launches, strict=True):
                self.device.spare_kernels.setdefault(launch.kernel, []).append(kernel)
        self.is_bound = False
        self._bound = []
        self._inputs: dict[int, list[tuple[Any, int]]] = {}
        self._outputs: dict[int, list[tuple[Any, int]]] = {}
        self._kept: list[Any] = []  # a kernel does not keep its arguments' memory

    __del__ = release

    def bind(self, memory: Any) -> None:
        """Make a kernel object for each launch and set its arguments, on `memory` of at least `nbytes`."""
        self.release()
        self.is_bound, self._kept = True, [memory]
        pairs = zip(self._planned, self._offsets, strict=True)
        places = {id(block): memory.get_sub_region(offset, block.nbytes) for block, offset in pairs}
        self._outputs = {id(source): [] for *_, source in self.results if isinstance(source, Block)}
        for part in self.parts:
            launches: list[Any] = []
            for launch in part.launches:
                args = [places.get(id(arg), arg) for arg in launch.args]
                spare = self.device.spare_kernels.get(launch.kernel, [])
                kernel = program.bound_copy(launch.kernel, [None if _varies(arg) else arg for arg in args], spare)
                self._note_varying(kernel, args)
                self._kept += args
                launches.append((kernel, *launch.sizes))
            self._bound.append((launches, part.states, part.function, part.args))

    def _note_varying(self, kernel: Any, args: list[Any]) -> None:
        for index, arg in enumerate(args):
            if isinstance(arg, Input):
                self._inputs.setdefault(int(arg), []).append((kernel, index))
            elif isinstance(arg, Block):
                self._outputs[id(arg)].append((kernel, index))

    @property
    def is_valid(self) -> bool:
        """Whether memory, hooks and requires_grad are still those of the recorded run."""
        return self._revision == self.device.revision

    def fits(self) -> bool:
        """Return whether everything is as it was when the recorded run began."""
        if not self.is_valid or not (self.surroundings is None or self.surroundings.are_same()):
            return False
        return all([slot.state for slot in space.slots] == states for space, states in self._before)

    def run(self, inputs: Sequence[Tensor]) -> Results:
        """Queue the launches on these inputs, once bound, and return the results, in fresh memory."""
        self.runs += 1
        device = self.device
        for number, uses in self._inputs.items():
            buffer = inputs[number].buffer
            for kernel, index in uses:
                kernel.set_arg(index, buffer)
        results = self._fresh_results(inputs)
        for launches, states, function, args in self._bound:
            device.launch_all(launches)
            for slot, state in states:
                slot.state = state
            if function is not None:
                function(*args)
        return results

    def _fresh_results(self, inputs: Sequence[Tensor]) -> Results:
        device, fresh, tensors = self.device, dict[int, Any](), []
        for shape, dtype, source in self.results:
            if isinstance(source, Block):
                buffer = fresh.get(id(source))
                if buffer is None:
                    buffer = fresh[id(source)] = device.allocate(source.nbytes)
                    for kernel, index in self._outputs[id(source)]:
                        kernel.set_arg(index, buffer)
            else:
                buffer = inputs[source].buffer if isinstance(source, Input) else source
            tensors.append(wrap(device, buffer, shape, dtype))
        if self._is_tuple:
            return tuple(tensors)
        return tensors[0] if tensors else None


def _varies(arg: Any) -> bool:
    return isinstance(arg, (Input, Block))
