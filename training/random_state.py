"""The states of a process's random generators as arrays: Python's, NumPy's global one, PyTorch's on the CPU, and the
stream of a device, from which dropout draws.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from clcomm.engine.device import Device
from clcomm.engine.random_stream import STATE_WORDS, RandomStream
from clcomm.jobs.checkpoint import invalid_entry

#: The number of words of a Mersenne Twister's state; its position is from 0 to this.
_TWISTER = 624
PARTS = _WORDS, _NORMAL, _TORCH, _STREAM = "words", "normal", "torch", "stream"


def random_state(device: Device | None = None) -> dict[str, np.ndarray]:
    """Return "words", uint32: Python's generator with its position, then NumPy's; "normal", float64 (2,); "torch".

    normal: the second of a pair of normal numbers, which Python and NumPy draw together; NaN where there is none.
    torch: uint8, if the program has imported PyTorch.
    stream: uint32, the state of the device's RandomStream, if one is given.
    """
    _, keys, position, has_normal, normal = np.random.get_state(legacy=True)
    _, python, python_normal = random.getstate()
    state = {
        _WORDS: np.concatenate([np.array(python, np.uint32), np.asarray(keys, np.uint32), [np.uint32(position)]]),
        _NORMAL: np.array([math.nan if python_normal is None else python_normal, normal if has_normal else math.nan]),
    }
    torch = _torch()
    if torch is not None:
        state[_TORCH] = torch.get_rng_state().numpy()
    return state if device is None else {**state, _STREAM: RandomStream.of(device).state()}


def check_random_state(entry: str, state: Mapping[str, np.ndarray]) -> None:
    """Raise CheckpointError unless `restore_random_state` accepts the state; `entry` is its name in the file."""
    words = state.get(_WORDS)
    if words is None or words.dtype != np.uint32 or words.shape != (2 * _TWISTER + 2,):
        raise invalid_entry(entry, f"{2 * _TWISTER + 2} uint32", words)
    for position in words[[_TWISTER, -1]].tolist():
        if position > _TWISTER:
            raise invalid_entry(entry, f"positions from 0 to {_TWISTER}", position)
    normal = state.get(_NORMAL)
    if normal is not None and (normal.dtype != np.float64 or normal.shape != (2,) or np.isinf(normal).any()):
        raise invalid_entry(f"{entry}/{_NORMAL}", "2 finite float64, or NaN", normal)
    stream = state.get(_STREAM)
    if stream is not None and (stream.dtype != np.uint32 or stream.shape != (STATE_WORDS,)):
        raise invalid_entry(f"{entry}/{_STREAM}", f"{STATE_WORDS} uint32", stream)
    torch, bits = _torch(), state.get(_TORCH)
    if torch is not None and bits is not None:
        try:
            torch.Generator().set_state(torch.tensor(bits))
        except (RuntimeError, TypeError):
            raise invalid_entry(f"{entry}/{_TORCH}", "the state of PyTorch's generator", bits) from None


def restore_random_state(state: Mapping[str, np.ndarray], device: Device | None = None) -> None:
    """Set the generators to what `random_state` returned; checkpoints of earlier releases have only the words."""
    words = state[_WORDS]
    python_normal, normal = state.get(_NORMAL, np.full(2, math.nan)).tolist()
    python = tuple(words[: _TWISTER + 1].tolist())
    random.setstate((3, python, None if math.isnan(python_normal) else python_normal))
    has_normal = not math.isnan(normal)
    np.random.set_state(
        ("MT19937", words[_TWISTER + 1 : -1], int(words[-1]), has_normal, normal if has_normal else 0.0)
    )
    torch = _torch()
    if torch is not None and _TORCH in state:
        torch.set_rng_state(torch.tensor(state[_TORCH]))
    if device is not None and _STREAM in state:
        RandomStream.of(device).load(state[_STREAM])


def continue_stream(state: Mapping[str, np.ndarray], device: Device | None, rank: int) -> None:
    """Let a device's stream go on as this rank's, after as many draws as in another rank's state."""
    if device is not None and _STREAM in state:
        stream = RandomStream.of(device)
        stream.load(stream.state_of(rank, state[_STREAM]))


def _torch() -> Any:
    """Return PyTorch if the program has imported it, else None."""
    return sys.modules.get("torch")
