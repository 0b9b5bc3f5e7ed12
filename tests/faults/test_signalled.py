"""Every call that signals a process is listed, with how it knows that the process is its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.faults.launch import ROOT

PACKAGES = "clcomm", "models", "training", "examples"
#: Names of the functions and methods that signal a process, of os, signal, subprocess, multiprocessing and MPI.
SIGNALS = {
    "Abort", "kill", "killpg", "pidfd_send_signal", "pthread_kill", "raise_signal", "send_signal", "sigqueue",
    "terminate",
}  # fmt: skip
#: The same in a program that another process runs.
IN_TEXT = re.compile(rf"\b({'|'.join(SIGNALS)})\(|\b(p?kill|killall) +-")


def signalling(source: str) -> Iterator[str]:
    """Yield the functions and names, with those that they are in, whose code or text signals a process."""

    def walk(node: ast.AST, within: tuple[str, ...]) -> Iterator[str]:
        for each in ast.iter_child_nodes(node):
            inner = within
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*within, each.name)
            elif isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and not within:
                inner = (each.targets[0].id,)
            called = each.func if isinstance(each, ast.Call) else None
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            is_text = isinstance(each, ast.Constant) and isinstance(each.value, str) and IN_TEXT.search(each.value)
            if name in SIGNALS or is_text:
                yield ".".join(within)
            yield from walk(each, inner)

    return walk(ast.parse(source), ())


def test_every_call_that_signals_a_process_is_in_the_table() -> None:
    found = {
        (str(path.relative_to(ROOT)), function)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for function in signalling(path.read_text())
    }
    section = (ROOT / "docs/robustness.md").read_text().partition("## What is ended\n")[2].partition("\n## ")[0]
    assert found == set(re.findall(r"^\| `([\w/.]+\.py)` `([\w.]+)` \|", section, re.MULTILINE))


def test_the_search_finds_what_it_looks_for() -> None:
    for call in ("os.kill(1, 9)", "child.terminate()", "killpg(1, 9)", "run(['sh', '-c', 'kill -9 1'])"):
        assert list(signalling(f"class A:\n    def b(self):\n        {call}")) == ["A.b"]
    assert list(signalling("TEXT = 'signal.pidfd_send_signal(1, 9)'")) == ["TEXT"]
    assert list(signalling("TEXT = 'died of kill'")) == []
