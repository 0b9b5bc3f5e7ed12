"""Arguments of the wrong type, and dimensions that are not there: refused by name, for every public function."""

from __future__ import annotations

import inspect
import itertools
import os
import random
import re
from types import FunctionType

import numpy as np
import pytest

import clcomm.as_torch
from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor, creation
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
            if kind.startswith(("Sequence", "Shape", "tuple")):
                given[-1] = (1, 1)
            elif any(scalar in kind for scalar in RIGHT) and kind not in RIGHT:
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


#: Of each function, how many drawn calls are compared.
_DRAWS = int(os.environ.get("CLCOMM_ARGUMENT_CASES", "40"))
#: Those that draw numbers of their own, leave memory as it is, or have PyTorch's name for something else.
_OTHERS = {
    *(name for name in (*F.__all__, *creation.__all__) if "dropout" in name or "rand" in name or "empty" in name),
    "bernoulli", "multinomial", "normal", "gumbel_softmax", "transpose",
}  # fmt: skip
#: What PyTorch says of arguments that are taken here: integers for a tensor of them or a tuple, numbers for tensors.
_WIDER = (
    r"missing|must be Tensor, not (list|tuple|int)|must be tuple of ints, not int|'mode' .* must be str|"
    r"^(index_fill|moveaxis|movedim|lerp|inner|scatter)\(\)|^(flip|tile)\(\) takes"
)


def arguments(library):
    floats = np.arange(6, dtype=np.float32).reshape(2, 3) / 4 + 0.25
    return [
        library.tensor(floats), library.tensor(floats[0]), library.tensor([2, 0]), library.tensor(floats > 0.6),
        library.tensor(2.0), [library.tensor(floats), library.tensor(floats + 1)], 1, 0, -1, 5, -3, True, 0.5, 2.0,
        "a", "sum", (1,), (2.0,), (2, 3), [0, 1], {},
    ]  # fmt: skip


def host(result):
    if isinstance(result, (list, tuple)):
        return [host(each) for each in result]
    return np.asarray(result.detach().numpy() if hasattr(result, "detach") else result)


def same(ours, theirs):
    if isinstance(ours, list) or isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours.shape == theirs.shape and np.allclose(ours, theirs, 1e-3, 1e-4, equal_nan=True)


def result_of(function, given, places):
    try:
        return host(function(*[given[place] for place in places]))
    except Exception as error:
        return error


@pytest.mark.filterwarnings("ignore")
def test_drawn_arguments_of_every_function_give_pytorchs_result_or_an_error(torch):
    ours, theirs, wrong, compared = arguments(clcomm.as_torch), arguments(torch), [], 0
    for name in sorted({*F.__all__, *creation.__all__} - _OTHERS):
        function = getattr(torch.nn.functional, name, None) or getattr(torch, name, None)
        rng = random.Random(name)
        for _ in range(_DRAWS if callable(function) else 0):
            places = [rng.randrange(6), *rng.choices(range(len(ours)), k=rng.choice((0, 1, 1, 2, 2, 3)))]
            if len(places) > 1 and rng.random() < 0.1:
                places[0] = rng.randrange(len(ours))
            found = result_of(getattr(clcomm.as_torch, name), ours, places)
            if isinstance(found, Exception):
                continue
            expected = result_of(function, theirs, places)
            compared += 1
            if isinstance(expected, Exception):
                is_refused = isinstance(expected, (TypeError, IndexError)) and not re.search(_WIDER, str(expected))
            else:
                is_refused = not same(found, expected)
            if is_refused:
                wrong.append((name, places, found, expected))
    assert not wrong, "\n".join(map(str, wrong))
    assert compared > _DRAWS * 10
