"""Weights as safetensors files (https://huggingface.co/docs/safetensors), which many libraries read and write.

Names, shapes and the order of elements are PyTorch's for the same layers, so a file goes either way.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from clcomm.base.errors import ArgumentError, CheckpointError, needed
from clcomm.base.storage.files import FilePath, open_regular, replacing, saving


class Model(Protocol):
    """A module of the engine, or any object with its state as arrays by name."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return all weights by name."""

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Set all weights."""


def save(path: FilePath, weights: Mapping[str, object] | Model, metadata: Mapping[str, str] | None = None) -> None:
    """Write weights, atomically.

    Args:
        weights: a model, or its `state_dict()`: arrays, or PyTorch's tensors, by name.
        metadata: texts to store beside them.

    Raises:
        ArgumentError: safetensors is not installed, or lacks a dtype.
        CheckpointWriteError: the file could not be written; an old one is kept.
    """
    state = weights if isinstance(weights, Mapping) else weights.state_dict()
    arrays = {name: _array(name, values) for name, values in state.items()}
    library = _library()
    try:
        data = library.numpy.save(arrays, dict(metadata) if metadata else None)
    except (library.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"weights: expected numbers and texts that safetensors can store: {_line(error)}") from None
    with saving("weights", path), replacing(path) as file:
        file.write(data)


def load(path: FilePath) -> dict[str, np.ndarray]:
    """Return the arrays of a file, sorted by name. CheckpointError where it is missing, truncated or damaged."""
    library = _library()
    try:
        with open_regular(path) as file:
            return dict(sorted(library.numpy.load(file.read()).items()))
    except OSError as error:
        raise CheckpointError(f"weights {os.fspath(path)}: could not be read ({error.strerror or error})") from None
    except (library.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"weights {os.fspath(path)}: expected a safetensors file, got a damaged or another one: {_line(error)}"
        ) from None


def load_into(model: Model, path: FilePath) -> None:
    """Set a model's weights from a file.

    An engine's parameter that several layers share may have one of its names alone there.

    Raises CheckpointError, changing nothing, where a name is missing or unexpected, or a shape or dtype differs.
    """
    found, state = load(path), model.state_dict()
    there = {id(values): found[name] for name, values in state.items() if name in found}
    found = {name: there[id(values)] for name, values in state.items() if id(values) in there} | found
    own = {name: _array(name, values) for name, values in state.items()}
    for name in dict.fromkeys([*own, *found]):
        expected, got = _described(own.get(name)), _described(found.get(name))
        if expected != got:
            raise CheckpointError(
                f"weights {os.fspath(path)}: {name!r}: expected {expected}, got {got}; load the file of such a model"
            )
    model.load_state_dict(found)


def _described(array: np.ndarray | None) -> str:
    """Return an array's kind and shape in words; integers of any size may be a counter's."""
    if array is None:
        return "no such name"
    return f"{'whole numbers' if array.dtype.kind in 'iu' else array.dtype} of shape {array.shape}"


def _array(name: str, values: Any) -> np.ndarray:
    """Return weights as a contiguous array, as safetensors writes an array's memory unchanged.

    Copies from a device are in no report: a file needs no ranks, and so no Communicator that would count them.
    """
    try:
        host = values.detach().cpu().numpy() if hasattr(values, "cpu") else values
        array = np.asarray(host)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"weights: {name!r}: expected an array of numbers: {_line(error)}") from None
    return np.ascontiguousarray(array).reshape(array.shape)


def _library() -> Any:
    with needed("safetensors"):
        import safetensors
        import safetensors.numpy
    return safetensors


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
