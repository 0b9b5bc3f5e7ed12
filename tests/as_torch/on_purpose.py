"""What is meant to differ from PyTorch at the edges of float32: a table of docs/ported.md, left out by drawn tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Difference(NamedTuple):
    """A row of the table.

    Attributes:
        texts: expressions of `tests/engine/test_edges.py` in which it shows.
        where: which elements, or rows, of their arguments show it.
    """

    what: str
    ours: str
    pytorchs: str
    texts: tuple[str, ...] = ()
    where: Callable[..., Any] = lambda *arrays: np.zeros(len(arrays[0]), bool)


def _any(test: Callable[[np.ndarray], np.ndarray]) -> Callable[..., Any]:
    """Return whether the test holds for any of the numbers of each row."""
    return lambda *arrays: np.any([test(each.reshape(len(each), -1)).any(1) for each in arrays], axis=0)


def _is_huge(x: np.ndarray) -> np.ndarray:
    return np.abs(x) > 1e18


def _is_unsquared(x: np.ndarray) -> np.ndarray:
    return _is_huge(x) | ((x != 0) & (np.abs(x) < 1e-18))


def _is_far(x: np.ndarray, y: np.ndarray) -> Any:
    with np.errstate(all="ignore"):
        return ~(np.abs(x.astype(np.float64) / y) < 1e18) | np.isinf(y)


_DEVIATIONS = ("x.var(-1)", "x.std(-1)", "x.std(-1, correction=0)", "F.layer_norm(x, (3,))")
DIFFERENCES = (
    Difference("gelu(inf)", "inf", "NaN in its vector code", ("F.gelu(x)",), _any(np.isposinf)),
    Difference("exp(x) below -86.9, where it is below 2e-38", "0", "the tiny number",
               ("F.kl_div(x, y, reduction='none', log_target=True)",), lambda x, y: y < -86.9),
    Difference("var, std and layer_norm of numbers above 1e18 or below 1e-18, whose squares float32 has not",
               "squares in float32", "var and std in float64", _DEVIATIONS, _any(_is_unsquared)),
    Difference("lerp, addcmul, addcdiv where a part is above 3e38", "each operation rounds", "some are one operation",
               ("t.lerp(x, y, z)", "t.addcmul(x, y, z, value=0.5)", "t.addcdiv(x, y, z, value=0.5)"), _any(_is_huge)),
    Difference("the gradient of atan2 near 1e-38", "its value", "0 or NaN, as squares underflow",
               ("t.atan2(x, y)",), lambda x, y: np.maximum(np.abs(x), np.abs(y)) < 1e-18),
    Difference("remainder, fmod and floor_divide of quotients above 3e38, or by infinity", "the exact rest",
               "NaN, or the rest of the rounded quotient",
               ("t.remainder(x, y)", "t.fmod(x, y)", "t.div(x, y, rounding_mode='floor')"), _is_far),
    Difference("kthvalue and median of equal elements", "the first one's index", "any one's",
               ("x.kthvalue(2, -1)[0]", "x.median(-1)[0]"),
               lambda x: np.any([(np.sort(x)[:, 1:] == np.sort(x)[:, :-1]).any(1)], axis=0)),
)  # fmt: skip

EDGES = {text: each.where for each in DIFFERENCES for text in each.texts}


def table() -> str:
    """Return the table as tests/proofs/edges.md has it."""
    rows = [f"| {each.what} | {each.ours} | {each.pytorchs} |" for each in DIFFERENCES]
    return "\n".join(["| of | here | PyTorch |", "|---|---|---|", *rows])
