"""Deprecated names: they work, warn where they are called, and are gone in the version that they named."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from clcomm import __version__
from clcomm.base.host.variables import deprecated

ROOT = Path(__file__).resolve().parent.parent


class Adder:
    @deprecated(use="Adder.plus", until="99.1")
    def add(self, number: int, *, to: int = 1) -> int:
        """Add."""
        return number + to


def test_it_works_and_warns_where_it_is_called() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert Adder().add(2, to=3) == 5
    (warning,) = caught
    assert str(warning.message) == "Adder.add: goes in clcomm 99.1; use Adder.plus"
    assert warning.category is DeprecationWarning and warning.filename == __file__
    assert (Adder.add.__name__, Adder.add.__doc__) == ("add", "Add.")
    assert Adder.add.__deprecated__ == str(warning.message)


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def overdue(source: str, now: str) -> list[str]:
    """Return the versions that deprecations of a source name and that have come."""
    return [text for text in re.findall(r'@deprecated\([^)]*until="([\d.]+)"', source) if version(text) <= version(now)]


def test_no_deprecation_is_overdue() -> None:
    found = {str(path): overdue(path.read_text(), __version__) for path in (ROOT / "clcomm").rglob("*.py")}
    assert {path: texts for path, texts in found.items() if texts} == {}


@pytest.mark.parametrize(("now", "expected"), [("1.1.9", []), ("1.2", ["1.2"]), ("1.10", ["1.2"])])
def test_an_overdue_one_is_found(now: str, expected: list[str]) -> None:
    assert overdue('@deprecated(use="b", until="1.2")\ndef a(): ...', now) == expected
