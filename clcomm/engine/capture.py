"""Capture and replay: a step's launches are recorded once and then queued again, without the Python that chose them.

The idea of CUDA graphs, for any OpenCL device: in a small model Python takes as long as the kernels do.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from clcomm.engine.autograd import is_recording
from clcomm.engine.comparison import difference
from clcomm.engine.device import Device
from clcomm.engine.reach import noting_code
from clcomm.engine.recording import Recorder, Recording, Results, as_tensors
from clcomm.engine.surroundings import Surroundings
from clcomm.engine.tensor import Tensor, wrap
from clcomm.errors import ArgumentError, ReplayError

_MOST_FAILURES = 3
_MOST_STATES = 6
#: Beside every so many: after so many replays the function runs as it is and is compared with its recording.
_FIRST_CHECKS = (0, 10, 100)
#: An arena gives way to the memory that a comparison takes where a recording needs more bytes than this: making kernel
#: objects anew takes as long as dozens of steps.
_LARGE_ARENA = 16 << 20


class _Entry:
    """What is known of one set of shapes: its recordings, one for each state of what they hold for, and failures to."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.failures = 0


class Replay:
    """A function of tensors that queues kernels, recorded once for each set of shapes and replayed after that.

    function: takes Tensors, and hashable values such as a gradient's weight, in any order; returns None, a Tensor or a
    tuple of Tensors, which come without a tape. It may run forward and backward; gradients, hooks and optimizer steps
    come out as they do without a Replay, bit for bit. limit: how many sets of shapes and values to remember.

    The first call with new shapes and values runs as it is, the second is recorded, later ones replay it. It is
    recorded anew for other states of the gradients (none, own, averaged), after hooks or `requires_grad` changed, and
    where Python values that its code can name (attributes of modules, globals, ...) are others. A function that brings
    values to the host or from it, synchronises with other ranks, leaves tensors behind, changes such values, or draws
    random numbers runs as it is; `refusal` says why. Before the first replay of a recording, the 11th, the 101st, and
    then every `check_every` replays, the function runs as it is and what it queues is compared: a difference before the
    first replay is a refusal, a later one a ReplayError. CLCOMM_REPLAY=0 in the environment turns replaying off.
    """

    def __init__(self, function: Callable[..., Results], *, limit: int = 16, check_every: int = 1000):
        if limit < 1:
            raise ArgumentError(f"limit: expected a number of sets of shapes from 1 up, got {limit}")
        if check_every < 1:
            raise ArgumentError(f"check_every: expected a number of replays from 1 up, got {check_every}")
        self.function, self.limit, self.check_every = function, limit, check_every
        self.enabled = os.environ.get("CLCOMM_REPLAY", "1") != "0"
        self.recorded = self.replayed = self.checked = 0  # runs
        self.refusal: str | None = None
        self._entries: OrderedDict[Any, _Entry] = OrderedDict()
        self._code: frozenset[CodeType] | None = frozenset()  # what runs in the function; None: not known
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
        if entry is None:
            with self._noting_code():
                return _without_tape(self.function(*args))
        if entry.failures >= _MOST_FAILURES:
            return _without_tape(self.function(*args))
        for recording in entry.recordings:
            if recording.fits():
                if recording.runs == recording.next_check:
                    return self._check(device, entry, recording, args)
                self.replayed += 1
                if not recording.is_bound:
                    recording.bind(self._memory_for(recording))
                return recording.run(inputs)
        return self._record(device, entry, args)

    @property
    def __wrapped__(self) -> Callable[..., Results]:
        return self.function

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
        code = self._code
        surroundings = Surroundings(self.function, args, code)
        with self._noting_code():
            recorder, results = self._watched(device, args)
        change = surroundings.change()
        if self._code != code and Surroundings(self.function, args, self._code).followed != surroundings.followed:
            recorder.refuse("it runs other code than before")
        if surroundings.unseen is not None:
            recorder.refuse(f"it may draw from {surroundings.unseen}, whose state cannot be compared")
        if change is not None:
            recorder.refuse(f"it changes {change}")
        if recorder.reason is not None:
            self._refuse(entry, recorder.reason)
            return results
        self._keep(entry, Recording(recorder, results, surroundings))
        self.recorded += 1
        return results

    @contextmanager
    def _noting_code(self) -> Iterator[None]:
        ran = set(self._code or ())
        with noting_code(ran) as is_complete:
            yield
        self._code = frozenset(ran) if is_complete and self._code is not None else None

    def _watched(self, device: Device, args: tuple[Any, ...]) -> tuple[Recorder, Results]:
        """Run the function as it is; return what notes everything it queued, and its results."""
        # Memory of their own makes the inputs distinct from each other and from whatever else the function uses.
        own = [_duplicate(arg) if isinstance(arg, Tensor) else arg for arg in args]
        recorder = Recorder(device, [arg for arg in own if isinstance(arg, Tensor)])
        device.recorder = recorder
        try:
            results = _without_tape(self.function(*own))
            recorder.finish(results)
        finally:
            device.recorder = None
        return recorder, results

    def _check(self, device: Device, entry: _Entry, recording: Recording, args: tuple[Any, ...]) -> Results:
        """Run the function as it is, and compare what it queues with its recording."""
        is_large = recording.nbytes > _LARGE_ARENA
        if is_large:
            self._release_arena()
        recorder, results = self._watched(device, args)
        found = recorder.reason or difference(recording, Recording(recorder, results))
        if is_large:
            device.memory.release_unused()
        later = self.check_every * (1 + recording.runs // self.check_every)
        recording.next_check = min([later, *(runs for runs in _FIRST_CHECKS if runs > recording.runs)])
        self.checked += 1
        if found is None:
            return results
        entry.recordings.remove(recording)
        if recording.runs:
            name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
            raise ReplayError(
                f"Replay: expected {name} to queue what was recorded, but {found}: some of its last {recording.runs:,} "
                "results may be wrong; pass what this depends on as an argument, or set CLCOMM_REPLAY=0"
            )
        self._refuse(entry, f"it does not do the same each time: {found}")
        return results

    def _refuse(self, entry: _Entry, reason: str) -> None:
        self.refusal = reason
        entry.failures += 1

    def _keep(self, entry: _Entry, recording: Recording) -> None:
        kept = [old for old in entry.recordings if old.is_valid][1 - _MOST_STATES :]
        for old in entry.recordings:
            if old not in kept and not old.runs:
                entry.failures += 1
                if entry.failures >= _MOST_FAILURES:
                    change = old.surroundings.change() if old.surroundings and old.is_valid else None
                    self.refusal = f"{change or 'what it uses'} changes from call to call"
        entry.recordings = [*kept, recording]
        for other in self._entries.values():  # what is void would keep memory that nothing else needs
            other.recordings = [old for old in other.recordings if old.is_valid]
        recording.device.memory.release_unused()  # the pool's memory for such a step: replays need none

    def _memory_for(self, recording: Recording) -> Any:
        """Return the arena, large enough for all recordings."""
        if self._arena is None or self._arena.size < recording.nbytes:
            self._release_arena()
            nbytes = max(each.nbytes for entry in self._entries.values() for each in entry.recordings)
            self._arena = recording.device.memory.exact(max(nbytes, 1))
        return self._arena

    def _release_arena(self) -> None:
        for entry in self._entries.values():
            for recording in entry.recordings:
                recording.release()
        self._arena = None


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
