"""The coding of compressed gradients, by a device or by NumPy, with a method for each function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from clcomm.sync.compression import coding


class Coding:
    """Each method prepares a call of the function of its name."""

    def __init__(self, codec: Any):
        self._codec = codec

    def __getattr__(self, name: str) -> Callable[..., coding.Work]:
        return partial(coding.prepared, self._codec, getattr(coding, name))
