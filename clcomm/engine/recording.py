"""Recordings: the launches of one run of a function with planned memory, ready to be queued again.

A buffer of that run is one of four things: planned memory in the arena, an input or a result (their memory changes at
each run, so these arguments are set again), or memory from before the run that stays (parameters, gradients). The arena
is one block of memory; buffers that are never in use together share places in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.host.arrays import aligned_empty
from clcomm.engine import host_addresses, program
from clcomm.engine.device import Device
from clcomm.engine.grad_slot import NONE
from clcomm.engine.guards import Guards
from clcomm.engine.program import Size
from clcomm.engine.recorder import Allocation, InputIndex, Recorder
from clcomm.engine.tensor import Tensor, wrap

if TYPE_CHECKING:
    import pyopencl as cl

    from clcomm.engine.device import Device

Results = Tensor | tuple[Tensor, ...] | None


class Lifetime(NamedTuple):
    """A buffer's size in bytes, and the first and last launch that use it, by number."""

    nbytes: int
    first: int
    last: int


def plan_arena(lifetimes: Sequence[Lifetime], alignment: int) -> tuple[list[int], int]:
    """Return (offset of each buffer, bytes in all); buffers in use at the same launch never overlap.

    The largest are placed first, each at the lowest offset that is free for its whole lifetime (greedy by size:
    Pisarchyk and Lee, 2020, "Efficient Memory Management for Deep Neural Net Inference").
    """
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    total = 0
    for index in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].nbytes, lifetimes[i].first)):
        nbytes, first, last = lifetimes[index]
        taken = sorted(
            (offsets[other], offsets[other] + lifetimes[other].nbytes)
            for other in placed
            if lifetimes[other].first <= last and first <= lifetimes[other].last
        )
        offset = 0
        for start, stop in taken:
            if offset + nbytes <= start:
                break
            offset = max(offset, -(-stop // alignment) * alignment)
        offsets[index] = offset
        placed.append(index)
        total = max(total, offset + nbytes)
    return offsets, total


def record(device: Device, function: Callable[..., Any], args: Sequence[object]) -> tuple[Recorder, Results]:
    """Run a function once; return the Recorder of its launches, and its results without the tape."""
    # Copies, so that each input differs by its address from the others and from all that the function uses.
    own = [_duplicate(arg) if isinstance(arg, Tensor) else arg for arg in args]
    inputs = [arg.buffer.int_ptr for arg in own if isinstance(arg, Tensor)]
    recorder = Recorder(device.memory, device.revision, {address: index for index, address in enumerate(inputs)})
    device.recorder = recorder
    try:
        results = without_tape(function(*own))
        _end(recorder, device.revision, results)
    finally:
        device.recorder = None
    for arg, copied in zip(args, own, strict=True):
        if isinstance(arg, Tensor) and isinstance(copied, Tensor) and copied.written_at >= 0:
            arg.copy_from(copied.numpy())
    return recorder, results


def _duplicate(tensor: Tensor) -> Tensor:
    device, buffer = tensor.device, tensor.device.allocate(tensor.nbytes)
    device.copy(buffer, tensor.buffer, tensor.nbytes)
    copied = wrap(device, buffer, tensor.shape, tensor.dtype)
    copied.buffer.known = copied.written_at, tensor.known_values
    return copied


def _end(recorder: Recorder, revision: int, results: object) -> None:
    """End the run; refuse it if memory other than its results stays in use."""
    recorder.end_segment()
    if revision != recorder.revision:
        recorder.refuse("memory, hooks or requires_grad of some tensor changed in it")
    tensors = as_tensors(results)
    if tensors is None:
        recorder.refuse(f"it returns {type(results).__name__}, not None, a tensor or a tuple of tensors")
    elif recorder.allocations.keys() - {tensor.buffer.int_ptr for tensor in tensors}:
        recorder.refuse("it leaves a tensor behind that it does not return")


def as_tensors(results: object) -> tuple[Tensor, ...] | None:
    """Return a function's results as a tuple; None if they are anything but tensors."""
    if results is None:
        return ()
    tensors = results if isinstance(results, tuple) else (results,)
    return tensors if all(isinstance(tensor, Tensor) for tensor in tensors) else None


def without_tape(results: Results) -> Results:
    """Return a function's results without the tape, as a replay does."""
    tensors = as_tensors(results)
    if not tensors:
        return results
    detached = tuple([tensor.alias(tensor.shape) for tensor in tensors])
    return detached if isinstance(results, tuple) else detached[0]


class LaunchRecording:
    """The launches of a finished Recorder, with memory planned in `nbytes` of an arena.

    Attributes:
        guards: the Python values under which it is valid.
        runs: number of replays.
        next_check: number of replays at which it is next compared with the function.
        results: (shape, dtype, source) of each result; the source is an Allocation, an InputIndex or a buffer.
        constants: the keys of the device's kept buffers that it uses, by address.
        is_bound: whether its kernel objects have their arguments set.
    """

    def __init__(self, device: Device, recorder: Recorder, results: Results, guards: Guards | None = None):
        self.device = device
        self.guards = guards
        self.runs = self.next_check = 0
        self._revision = recorder.revision
        self._before = list(recorder.before.items())
        self._decisions, self._in_doubt = recorder.decisions, recorder.in_doubt
        self.segments = recorder.segments
        self._written, self._parts = recorder.written, list(recorder.parts.values())
        self._bound: list[tuple[list[Any], Any, Any, Any]] = []
        self._is_tuple, tensors = isinstance(results, tuple), as_tensors(results) or ()
        self.results = [(t.shape, t.dtype, self._source(recorder, t.buffer)) for t in tensors]
        returned = {id(source) for *_, source in self.results}
        noted = [arg for segment in recorder.segments for launch in segment.launches for arg in launch.args]
        planned = {id(arg): arg for arg in noted if isinstance(arg, Allocation) and id(arg) not in returned}
        kept = {buffer.int_ptr: key for key, buffer in self.device.kept.items()}
        addresses = {getattr(arg, "int_ptr", None) for arg in noted}
        self.constants = {address: key for address, key in kept.items() if address in addresses}
        self._planned = list(planned.values())
        for allocation in recorder.allocations.values():
            allocation.owner = None
        lifetimes = [Lifetime(each.nbytes, each.first, each.last) for each in self._planned]
        self._offsets, self.nbytes = plan_arena(lifetimes, self.device.buffer_alignment)
        self.release()

    @staticmethod
    def _source(recorder: Recorder, buffer: cl.Buffer) -> Allocation | InputIndex | cl.Buffer:
        address = buffer.int_ptr
        if address in recorder.allocations:
            return recorder.allocations[address]
        return InputIndex(recorder.inputs[address]) if address in recorder.inputs else buffer

    def release(self) -> None:
        """Release the arena, and return the kernel objects that were made for it to the device."""
        for segment, (launches, *_) in zip(self.segments, self._bound, strict=False):
            for launch, (kernel, *_) in zip(segment.launches, launches, strict=True):
                self.device.spare_kernels.setdefault(launch.kernel, []).append(kernel)
        self.is_bound = False
        self._bound = []
        self._inputs: dict[int, list[tuple[cl.Kernel, int]]] = {}
        self._outputs: dict[int, list[tuple[cl.Kernel, int]]] = {}
        self._result_memory: dict[int, ResultMemory] = {}
        self._latest: dict[int, object] = {}  # addresses of inputs that the kernels have
        self._kept: list[object] = []  # a kernel does not keep its arguments alive

    __del__ = release

    def bind(self, memory: Any) -> None:
        """Make a kernel object for each launch and set its arguments; `memory` has at least `nbytes`."""
        self.release()
        self.is_bound, self._kept = True, [memory]
        pairs = zip(self._planned, self._offsets, strict=True)
        places = {id(each): memory.get_sub_region(offset, each.nbytes) for each, offset in pairs}
        for _, dtype, source in self.results:
            if isinstance(source, Allocation):
                self._outputs[id(source)] = []
                if ResultMemory.serves(self.device, source.nbytes):
                    self._result_memory[id(source)] = ResultMemory(self.device, source.nbytes, dtype)
        for segment in self.segments:
            launches: list[tuple[cl.Kernel, Size, Size | None]] = []
            for launch in segment.launches:
                args = [places.get(id(arg), arg) for arg in launch.args]
                spare = self.device.spare_kernels.get(launch.kernel, [])
                set_once = [None if _varies(arg) else host_addresses.argument(self.device, arg) for arg in args]
                kernel = program.bound_copy(launch.kernel, set_once, spare)
                self._note_varying(kernel, args)
                self._kept += args
                launches.append((kernel, *_fewest_sizes(*launch.sizes)))
            self._bound.append((launches, segment.states, segment.function, segment.args))

    def _note_varying(self, kernel: cl.Kernel, args: list[object]) -> None:
        for index, arg in enumerate(args):
            if isinstance(arg, InputIndex):
                self._inputs.setdefault(int(arg), []).append((kernel, index))
            elif isinstance(arg, Allocation):
                self._outputs[id(arg)].append((kernel, index))

    @property
    def is_valid(self) -> bool:
        """Whether memory, hooks and requires_grad are still those of the recorded run."""
        return self._revision == self.device.revision

    def fits(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether the guards and the gradients' states are those at the start of the recorded run.

        So has to be what it decided by values that the host knows, such as that all labels are classes: for inputs of
        which that is an error the function runs, and raises it.
        """
        if not self.is_valid or not (self.guards is None or self.guards.are_same()):
            return False
        if any(root.written_at != write for root, write in self._parts):
            return False
        try:
            for source, rule, outcome in self._decisions:
                tensor = inputs[source] if isinstance(source, int) else source
                if rule(tensor.known_values) != outcome:
                    return False
        except ArgumentError:
            return False
        return all([slot.state for slot in slots] == states for slots, states in self._before)

    def run(self, inputs: Sequence[Tensor]) -> Results:
        """Queue the launches of a bound recording on these inputs; return the results in new memory."""
        self.runs += 1
        device = self.device
        device.in_doubt |= self._in_doubt
        for number, uses in self._inputs.items():
            buffer = inputs[number].buffer
            argument = host_addresses.kept_argument(device, buffer)
            if self._latest.get(number) is not argument:
                for kernel, index in uses:
                    kernel.set_arg(index, argument)
                self._latest[number] = None if argument is buffer else argument  # a kept buffer would stay in use
        results = self._new_results(inputs)
        for launches, states, function, args in self._bound:
            device.launch_all(launches)
            for slot, state in states:
                if state == NONE:
                    slot.drop()
                else:
                    slot.state = state
            if function is not None:
                function(*args)
        for tensor in self._written:
            tensor.note_write()
        return results

    def _new_results(self, inputs: Sequence[Tensor]) -> Results:
        device, tensors = self.device, []
        made: dict[int, cl.Buffer] = {}
        for shape, dtype, source in self.results:
            if isinstance(source, Allocation):
                buffer = made.get(id(source))
                if buffer is None:
                    memory = self._result_memory.get(id(source))
                    if memory is None:
                        buffer = argument = device.allocate(source.nbytes)
                    else:
                        buffer, argument = memory.take()
                    made[id(source)] = buffer
                    for kernel, index in self._outputs[id(source)]:
                        kernel.set_arg(index, argument)
            else:
                buffer = inputs[source].buffer if isinstance(source, InputIndex) else source
            tensors.append(wrap(device, buffer, shape, dtype))
        if self._is_tuple:
            return tuple(tensors)
        return tensors[0] if tensors else None


def _fewest_sizes(global_size: Size, local_size: Size | None) -> tuple[Size, Size | None]:
    """Return the fewest sizes for a launch: a single work-item is its own group, and fewer sizes are cheaper."""
    return global_size, None if set(global_size) == {1} else local_size


def _varies(arg: object) -> bool:
    return isinstance(arg, (InputIndex, Allocation))


# --- Memory of a recording's small results, such as a loss: on host arrays, used again and again. ---
# A buffer from the pool costs a replay its allocation, a launch that looks after it, and a copy by the driver when its
# value is read. On a device that takes addresses all three can be left out.

#: Bytes of the largest result of this kind, and the most of its places: a program keeps a loss or two.
MOST_BYTES, _MOST_PLACES = 64, 4


class ResultMemory:
    """The places of one result; a place is free again when nothing else refers to its buffer.

    Args:
        nbytes: of the result.
        dtype: of its elements.
    """

    def __init__(self, device: Device, nbytes: int, dtype: np.dtype):
        self._device, self._nbytes, self._dtype = device, nbytes, dtype
        self._places: list[tuple[Allocation, Any]] = []

    @staticmethod
    def serves(device: Device, nbytes: int) -> bool:
        """Return whether results of a device of so many bytes can have such places."""
        return device.takes_addresses and nbytes <= MOST_BYTES

    def take(self) -> tuple[Any, Any]:
        """Return a buffer that nothing uses, and the kernel argument for it; a pooled one if all places are taken."""
        for place, argument in self._places:
            if place.is_unused():
                return place.owner, argument
        if len(self._places) == _MOST_PLACES:
            buffer = self._device.allocate(self._nbytes)
            return buffer, buffer
        array = aligned_empty((self._nbytes // self._dtype.itemsize,), self._dtype)
        buffer = self._device.memory.exact(on_top_of=array)
        self._places.append((Allocation(buffer, self._nbytes), host_addresses.kept_argument(self._device, buffer)))
        return buffer, self._places[-1][1]
