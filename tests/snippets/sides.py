"""Runs a snippet with PyTorch and with the engine, and compares what its names are bound to in the end."""

from __future__ import annotations

import ast
import copy
import itertools
import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

import clcomm.as_torch
from clcomm import optim
from clcomm.base.errors import ClcommError
from clcomm.engine import Replay, default_device, functional, nn
from clcomm.engine.tensor_methods import require_none_noted

SAME, REFUSED, SILENT, CRASHED = "same", "refused", "silent", "crashed"
#: PyTorch's types, and the engine's of the same values: int64 alone has another, whose values refuse to be too large.
TYPES = {"int64": "int32"}


class Outcome(NamedTuple):
    """How a snippet ended: `kind` is one of the four above, `what` says the rest."""

    kind: str
    what: str


class Ended(NamedTuple):
    """What a side made of a snippet: what it saw after each statement, and the error that ended it.

    Of the engine's side the last is seen alone, as reading is a part of what a program does.
    """

    seen: list[Any]
    statements: int
    error: BaseException | None


def names_of(library: str) -> dict[str, Any]:
    """Return what a snippet may use: the names that the imports of docs/ported.md bind, of "torch" or "clcomm"."""
    if library == "torch":
        import torch

        found = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "optim": torch.optim,
                 "data": torch.utils.data, "replayed": lambda step: step}  # fmt: skip
    else:
        found = {"torch": clcomm.as_torch, "nn": nn, "F": functional, "optim": optim, "data": clcomm.as_torch.data,
                 "replayed": Replay}  # fmt: skip
    return {**found, "init": found["nn"].init, "np": np, "copy": copy, "inf": math.inf, "nan": math.nan}


def parts_of(text: str) -> list[CodeType]:
    """Return a snippet's statements, compiled."""
    return [compile(ast.Module([each], []), "snippet", "exec") for each in ast.parse(text).body]


def ended(text: str, library: str) -> Ended:
    """Run a snippet with a library."""
    names, seen, done, error = names_of(library), [], 0, None
    given, parts = set(names), parts_of(text)
    names["torch"].manual_seed(1)

    def look() -> None:
        seen.append(seen_of({name: each for name, each in names.items() if name not in given}))

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            for part in parts:
                if library == "torch":
                    look()
                exec(part, names)
                done += 1
            look()
        except Exception as raised:
            error = raised
            with suppress(Exception):
                look()
        names["torch"].set_grad_enabled(True)
        if library != "torch":
            with suppress(ClcommError):  # a note of a target that is no class, of which nothing was read
                require_none_noted(default_device())
    return Ended(seen, done, error)


def seen_of(value: Any, depth: int = 0) -> Any:
    """Return a value as one that a comparison reads: arrays in place of tensors, with their gradients."""
    kind = type(value).__name__
    if hasattr(value, "requires_grad") and hasattr(value, "detach"):
        array = np.array(value.detach().numpy())
        grad = value.grad if depth < 9 and (value.grad_fn is None) else None
        return ("tensor", str(value.dtype).rpartition(".")[2], tuple(value.shape), array, bool(value.requires_grad),
                None if grad is None else seen_of(grad, 9))  # fmt: skip
    if hasattr(value, "named_parameters"):
        return ("module", {name: seen_of(each) for name, each in value.named_parameters()})
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.name, value.shape, value.copy())
    if isinstance(value, (bool, np.bool_)):
        return ("bool", bool(value))
    if isinstance(value, (int, np.integer)):
        return ("int", int(value))
    if isinstance(value, (float, np.floating)):
        return ("float", float(value))
    if isinstance(value, str) or value is None:
        return ("text", value)
    if isinstance(value, dict):
        return (
            "dict",
            {str(key): seen_of(each, depth) for key, each in value.items() if not str(key).startswith("__")},
        )
    if isinstance(value, (list, tuple)):
        return ("list", {str(number): seen_of(each, depth) for number, each in enumerate(value)})
    return ("other", kind if kind in ("NotImplementedType", "ellipsis") else "")


def difference(ours: Any, theirs: Any, name: str = "") -> str:
    """Return in words where two seen values differ; "" if nowhere."""
    if ours[0] == "array" and theirs[0] == "tensor" and "." in name:  # of a state_dict
        ours, theirs = ours[:4], ("array", *theirs[1:4])
    if (ours[0], theirs[0]) == ("other", "dict"):  # an optimizer's group
        return ""
    if ours[0] != theirs[0]:
        return f"{name}: {ours[0]} for {theirs[0]}"
    if ours[0] in ("dict", "list", "module"):
        if ours[1].keys() != theirs[1].keys():
            return f"{name}: has {', '.join(ours[1]) or 'nothing'} for {', '.join(theirs[1]) or 'nothing'}"
        found = (difference(ours[1][key], theirs[1][key], f"{name}.{key}" if name else key) for key in ours[1])
        return next(filter(None, found), "")
    if ours[0] not in ("tensor", "array"):
        if ours[0] == "float":
            return "" if _are_close(np.array(ours[1]), np.array(theirs[1])) else f"{name}: {ours[1]} for {theirs[1]}"
        return "" if ours[1:] == theirs[1:] else f"{name}: {ours[1]!r} for {theirs[1]!r}"
    if ours[1] not in (
        (TYPES.get(theirs[1], theirs[1]),) if ours[0] == "tensor" else (theirs[1], TYPES.get(theirs[1]))
    ):
        return f"{name}: {ours[1]} for {theirs[1]}"
    if ours[2] != theirs[2]:
        return f"{name}: shape {ours[2]} for {theirs[2]}"
    if not _are_close(ours[3], theirs[3]):
        return f"{name}: {_short(ours[3])} for {_short(theirs[3])}"
    if ours[0] == "array":
        return ""
    if ours[4] != theirs[4]:
        return f"{name}: requires_grad {ours[4]} for {theirs[4]}"
    if ours[5] is None or theirs[5] is None:
        return "" if ours[5] is theirs[5] else f"{name}.grad: {_grad(ours[5])} for {_grad(theirs[5])}"
    return difference(ours[5], theirs[5], f"{name}.grad")


def _short(array: np.ndarray) -> str:
    return np.array2string(array, threshold=20, precision=4).replace("\n", "")


def _grad(seen: Any) -> str:
    return "None" if seen is None else _short(seen[3])


def _are_close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    if theirs.dtype.kind not in "f":
        return np.array_equal(ours, theirs)
    finite = theirs[np.isfinite(theirs)]
    largest = float(np.abs(finite.astype(np.float64)).max()) if finite.size else 0.0
    with np.errstate(all="ignore"):
        return bool(np.allclose(ours, theirs, rtol=2e-4, atol=1e-5 * min(largest, 1e30) + 1e-5, equal_nan=True))


def compared(text: str) -> Outcome:
    """Return how a snippet ends with the engine, beside PyTorch."""
    theirs, ours = ended(text, "torch"), ended(text, "clcomm")
    if ours.error is not None:
        is_told = isinstance(ours.error, (ClcommError, TypeError, AttributeError, IndexError))
        if theirs.error is None and not is_told and "read-only" not in str(ours.error):  # NumPy's, of an array of ours
            return Outcome(CRASHED, f"{type(ours.error).__name__}: {ours.error}")
        done = ours.statements
        # A statement that PyTorch refuses too, or that is made of several, may have done a part of its work.
        if ours.seen and done < theirs.statements and isinstance(ast.parse(text).body[done], ast.Assign | ast.Expr):
            found = difference(ours.seen[-1], theirs.seen[done])
            if found and "within int32" not in str(ours.error):  # which names the integers that differ
                return Outcome(SILENT, f"before its error, {found}")
        return Outcome(REFUSED if theirs.error is None else SAME, str(ours.error))
    if theirs.error is not None:
        said = str(theirs.error).strip().partition("\n")[0]
        return Outcome(SILENT, f"PyTorch raises {type(theirs.error).__name__}: {said[:150]}")
    found = difference(ours.seen[-1], theirs.seen[-1])
    return Outcome(SILENT, found) if found else Outcome(SAME, "")


def shrunk(text: str, is_wanted: Callable[[str], bool], most: int = 60) -> str:
    """Return a snippet without the statements that it can do without and still be wanted; as far as `most` tries go."""
    number, text = 0, ast.unparse(ast.parse(text))
    while (shorter := _without(text, number)) is not None and (most := most - 1) >= 0:
        if len(shorter) < len(text) and is_wanted(shorter):
            text = shorter
        else:
            number += 1
    return text


def _without(text: str, number: int) -> str | None:
    """Return a snippet without its statement of a number, counted through all blocks, the last first; None: no such."""
    tree = ast.parse(text)
    blocks = [getattr(node, field) for node in ast.walk(tree) for field in ("body", "orelse")
              if isinstance(getattr(node, field, None), list)]  # fmt: skip
    places = list(itertools.chain.from_iterable([(block, place) for place in range(len(block))] for block in blocks))
    if number >= len(places):
        return None
    block, place = places[len(places) - 1 - number]
    del block[place]
    if not block and block is not tree.body:
        block.append(ast.Pass())
    return ast.unparse(ast.fix_missing_locations(tree))
