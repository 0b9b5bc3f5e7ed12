"""Flags, numbers and words in the wrong places: refused by name, for every public function and method."""

from __future__ import annotations

import inspect
import itertools
from types import FunctionType

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.engine import functional as F

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
#: What stands for an argument of each type, and what is none of it.
RIGHT = {"bool": True, "int": 1, "str": "mean", "float": 0.5}
WRONG = {"bool": (1, 0.5, "a"), "int": (True, 0.5, "a"), "str": (1, True), "float": (True, "a")}
REDUCTIONS = (
    "sum", "mean", "max", "min", "prod", "argmax", "argmin", "amax", "amin", "logsumexp", "var", "std", "median", "all",
    "any", "nansum", "cumsum", "cumprod", "softmax", "sort", "argsort", "unsqueeze", "squeeze", "flatten",
)  # fmt: skip
#: Each other's: booleans are PyTorch's `unbiased` of all dimensions, and some take several dimensions there alone.
REFUSED_HERE = {"var", "std", "all", "any", "squeeze", "logsumexp"}


def public():
    yield from (getattr(F, name) for name in F.__all__)
    methods = (getattr(Tensor, name) for name in dir(Tensor) if not name.startswith("_"))
    yield from (each for each in methods if isinstance(each, FunctionType))


def test_every_argument_of_one_type_is_checked_for_it():
    checked = 0
    for function in public():
        parameters = list(inspect.signature(function).parameters.values())
        given = []
        for each in parameters:
            kind = str(each.annotation).removeprefix("builtins.")
            if each.kind is each.KEYWORD_ONLY or each.kind is each.VAR_KEYWORD:
                break
            for wrong in WRONG.get(kind, ()):
                checked += 1
                with pytest.raises(
                    ArgumentError, match=rf"^\w+: {each.name.replace('self', 'x')}: expected .*, got {wrong!r}$"
                ):
                    function(*given, wrong)
            given.append(RIGHT.get(kind, Tensor(X)))
            if any(scalar in kind for scalar in RIGHT) and kind not in RIGHT:
                given[-1] = 1 if "int" in kind else 0.5 if "float" in kind else None
    assert checked > 300


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_drawn_positional_arguments_give_pytorchs_result_or_an_error(torch, name):
    for args in [*itertools.product((0, 1, -1, True, None, (0, 1), (), 0.5, "a"), repeat=2), (0,), (2,), ((0, 2),), ()]:
        ours, theirs = (outcome(make(X), name, args) for make in (Tensor, torch.tensor))
        if isinstance(ours, Exception):
            is_refused = isinstance(theirs, Exception) or name in REFUSED_HERE or args[1:] == (None,)
            assert is_refused, (args, ours, theirs)
        elif isinstance(theirs, Exception):  # None, and nothing, stand for all dimensions here, or for the last one
            assert args in ((), (None,)) or args[0] is None, (args, ours, theirs)
        else:
            assert ours.shape == theirs.shape and np.allclose(ours, theirs, 1e-4, equal_nan=True), (args, ours, theirs)


def outcome(x, name, args):
    try:
        found = getattr(x, name)(*args)
        return np.asarray((found[0] if isinstance(found, tuple) else found).numpy())
    except (ArgumentError, TypeError, IndexError, RuntimeError, ValueError) as error:
        return error
