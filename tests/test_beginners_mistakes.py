"""Each mistake of tests/beginners.py is one line that names it, the same on every rank, alone and on several."""

from __future__ import annotations

import importlib.util

import pytest

from clcomm.base.errors import ClcommError
from tests import beginners

_HAS_TORCH = importlib.util.find_spec("torch") is not None


def told(comm, code: str) -> str:
    """Return what a program is told that makes a mistake, with the kind of the error where it is no ClcommError."""
    names = {"comm": comm}
    exec(beginners.PREAMBLE, names)
    if _HAS_TORCH:
        exec("import torch\nnet = torch.nn.Linear(4, 3)", names)
    try:
        exec(code, names)
    except ClcommError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__} instead of an error of clcomm: {error}"
    return "nothing"


def wrong(comm, mistakes) -> list[str]:
    """Return the mistakes that are not named in one line on every rank."""
    found = []
    for code, message in mistakes:
        lines = comm.all_gather_object(told(comm, code))
        if any(message not in line or "\n" in line or len(line) > 400 for line in lines):
            found.append(f"{code!r}: expected {message!r}, got {lines}")
    return found


def test_a_hundred_mistakes_are_named():
    assert len(beginners.NATIVE) >= 100


@pytest.mark.parametrize("kind", ["native", "PyTorch"])
def test_every_mistake_is_named(comm, kind):
    if kind == "PyTorch" and not _HAS_TORCH:
        pytest.skip("PyTorch is not installed")
    mistakes = beginners.NATIVE if kind == "native" else beginners.OF_PYTORCH
    assert not (found := wrong(comm, mistakes)), "\n".join(found)


@pytest.mark.parametrize("kind", ["native", "PyTorch"])
def test_every_mistake_of_several_ranks_is_named(several, kind):
    if kind == "PyTorch" and not _HAS_TORCH:
        pytest.skip("PyTorch is not installed")
    mistakes = beginners.OF_SEVERAL if kind == "native" else beginners.OF_PYTORCH_AND_SEVERAL
    assert not (found := wrong(several, mistakes)), "\n".join(found)
