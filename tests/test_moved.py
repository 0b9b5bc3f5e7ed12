"""Modules that have moved have two names for two versions: one module, and a warning that says the new name."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from packaging.version import Version

from clcomm import __version__, _moved

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("old", sorted(_moved.MOVED))
def test_an_old_name_is_the_same_module(old):
    new = f"clcomm.{_moved.MOVED[old]}"
    program = f"""if True:
        import importlib, warnings
        first = importlib.import_module({new!r}) if {len(old) % 2} else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import clcomm.{old} as by_name
            from clcomm import {old} as by_attribute
        second = importlib.import_module({new!r})
        assert by_attribute is by_name is second and second in (first or second,), (by_name, second)
        assert second.__spec__.name == second.__name__ == {new!r}
        print(*(f"{{each.filename}}: {{each.message}}" for each in caught), sep="\\n")
    """
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"<string>: clcomm.{old}: goes in clcomm {_moved.UNTIL}; use {new}\n"


def test_modules_in_them_too_and_no_others():
    with pytest.warns(DeprecationWarning, match=r"clcomm\.costs: goes in .* use clcomm\.comm\.costs"):
        inner = import_module("clcomm.costs.costfile")
    assert inner is import_module("clcomm.comm.costs.costfile")
    for name in ("clcomm.errors_", "clcomm.base.job"):
        with pytest.raises(ModuleNotFoundError):
            import_module(name)


def test_the_old_names_are_not_overdue():
    assert Version(__version__) < Version(_moved.UNTIL)
