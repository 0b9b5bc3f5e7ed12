"""Capture and replay: a step's launches are recorded once and then queued again, without the Python that chose them.

The idea of CUDA graphs, for any OpenCL device: in a small model Python takes as long as the kernels do.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from clcomm.engine.autograd import is_recording
from clcomm.engine.device import Device
from clcomm.engine.recording import Recorder, Recording, Results, as_tensors
from clcomm.engine.tensor import Tensor, wrap
from clcomm.errors import ArgumentError

_MOST_FAILURES = 3
_MOST_STATES = 6


class _Entry:
    """What is known of one set of shapes: its recordings, one for each state of the gradients, and failures to."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.failures = 0


class Replay:
    """A function of tensors that queues kernels, recorded once for each set of shapes and replayed after that.

    function: takes Tensors, and hashable values such as a gradient's weight, in any order; returns None, a Tensor or a
    tuple of Tensors, which come without a tape. It may run forward and backward; gradients, hooks and optimizer steps
    come out as they do without a Replay, bit for bit. limit: how many sets of shapes and values to remember.

    The first call with new shapes and values runs as it is, the second is recorded, later ones replay it. It is
    recorded anew for other states of the gradients (none, own, averaged), and after hooks or `requires_grad` changed.
    A function that brings values to the host or from it, or leaves tensors behind, runs as it is; `refusal` says why.
    What else it does in Python is not seen: its course and any tensors it takes from around it must stay the same.
    CLCOMM_REPLAY=0 in the environment turns replaying off.
    """

    def __init__(self, function: Callable[..., Results], *, limit: int = 16):
        if limit < 1:
            raise ArgumentError(f"limit: expected a number of sets of shapes from 1 up, got {limit}")
        self.function, self.limit = function, limit
        self.enabled = os.environ.get("CLCOMM_REPLAY", "1") != "0"
        self.recorded = self.replayed = 0  # runs
        self.refusal: str | None = None
        self._entries: OrderedDict[Any, _Entry] = OrderedDict()
        self._arena: Any = None
        self._busy = False

    def __call__(self, *args: Any) -> Results:
        """Run the function, or queue what it queued last time; raises what the function raises."""
        inputs = [arg for arg in args if isinstance(arg, Tensor)]
        device = self._device(inputs)
        if not self.enabled or self._busy or device.recorder is not None or _on_tape(inputs):
            return _without_tape(self.function(*args))
        self._busy = True
        try:
            return self._run(device, args, inputs)
        finally:
            self._busy = False

    def _run(self, device: Device, args: tuple[Any, ...], inputs: list[Tensor]) -> Results:
        entry = self._entry(args)
        if entry is None or entry.failures >= _MOST_FAILURES:
            return _without_tape(self.function(*args))
        for recording in entry.recordings:
            if recording.fits():
                self.replayed += 1
                return recording.run(inputs)
        return self._record(device, entry, args)

    @staticmethod
    def _device(inputs: list[Tensor]) -> Device:
        if not inputs:
            raise ArgumentError("Replay: expected at least one Tensor among the arguments, got none")
        device = inputs[0].device
        if any(tensor.device is not device for tensor in inputs):
            raise ArgumentError("Replay: expected tensors on one device, got several")
        return device

    def _entry(self, args: tuple[Any, ...]) -> _Entry | None:
        """Return what is known of arguments like these; None at first sight, after which they are known."""
        keys = [(arg.device, arg.shape, arg.dtype) if isinstance(arg, Tensor) else arg for arg in args]
        key = (is_recording(), *keys)
        try:
            entry = self._entries.get(key)
        except TypeError:
            raise ArgumentError("Replay: expected tensors and hashable values; wrap arrays in Tensor(...)") from None
        if entry is None:
            self._entries[key] = _Entry()
            if len(self._entries) > self.limit:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(key)
        return entry

    def _record(self, device: Device, entry: _Entry, args: tuple[Any, ...]) -> Results:
        # Memory of their own makes the inputs distinct from each other and from whatever else the function uses.
        own = [_duplicate(arg) if isinstance(arg, Tensor) else arg for arg in args]
        recorder = Recorder(device, [arg for arg in own if isinstance(arg, Tensor)])
        device.recorder = recorder
        try:
            results = _without_tape(self.function(*own))
            recorder.finish(results)
        finally:
            device.recorder = None
        if recorder.reason is not None:
            self.refusal = recorder.reason
            entry.failures += 1
            return results
        self._keep(entry, Recording(recorder, results))
        self.recorded += 1
        return results

    def _keep(self, entry: _Entry, recording: Recording) -> None:
        kept = [old for old in entry.recordings if old.is_valid][1 - _MOST_STATES :]
        entry.failures += sum(not old.runs for old in entry.recordings if old not in kept)
        entry.recordings = kept
        for other in self._entries.values():  # what is void would keep memory that nobody else needs
            other.recordings = [old for old in other.recordings if old.is_valid]
        device = recording.device
        device.memory.release_unused()  # the pool's memory for such a step: replays need none
        if self._arena is None or self._arena.size < recording.nbytes:
            for other in self._entries.values():  # they would keep the smaller arena beside the larger one
                other.recordings.clear()
            self._arena = None
            self._arena = device.memory.exact(max(recording.nbytes, 1))
        recording.bind(self._arena)
        entry.recordings.append(recording)


def _on_tape(inputs: list[Tensor]) -> bool:
    return is_recording() and any(tensor.requires_grad for tensor in inputs)


def _duplicate(tensor: Tensor) -> Tensor:
    device, buffer = tensor.device, tensor.device.allocate(tensor.nbytes)
    device.copy(buffer, tensor.buffer, tensor.nbytes)
    return wrap(device, buffer, tensor.shape, tensor.dtype)


def _without_tape(results: Any) -> Any:
    """Return the results without the tape, which a replay does not have either."""
    tensors = as_tensors(results)
    if not tensors:
        return results
    return tuple([tensor.detach() for tensor in tensors]) if isinstance(results, tuple) else results.detach()
