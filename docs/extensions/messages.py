"""Collects the messages of all errors that clcomm can raise, from the sources alone.

They are the texts with which its errors are constructed, and all other texts that have a message's form, "expected A,
got B": a function may return one, which another raises, on another rank even. Those of a Synchronizer's options are
declared with them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
#: Where errors that a user may read are raised.
PACKAGES = ("clcomm", "training", "models")
ANY = "…"
_FORM = re.compile(r"\bexpected\b.*\b(got|found|but|states?)\b|could not be written|cannot be read|is not installed")
#: The error of a text that is not constructed where it stands.
PASSED_ON = ""


class Message(NamedTuple):
    """A message: the file that raises it, its error's class, and its text, with … for what is filled in."""

    file: str
    error: str
    text: str

    @property
    def subject(self) -> str:
        """What the message begins with: the argument or option that it is about."""
        head, colon, _ = self.text.partition(": ")
        return head if colon and len(head) < 60 else ""


def error_classes() -> set[str]:
    """Return the names of ClcommError and all classes below it."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    found = {"ClcommError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@cache
def messages() -> list[Message]:
    """Return each message once, in the order of files."""
    classes = error_classes()
    found: dict[Message, None] = {}
    for path in sources():
        tree = ast.parse(path.read_text())
        file = path.relative_to(ROOT).as_posix()
        constructed = [
            Message(file, _name(call.func), text)
            for function, call in _calls(tree, classes)
            for text in _texts(call, function)
        ]
        known = {message.text for message in constructed}
        found.update(dict.fromkeys(constructed))
        found.update({Message(file, PASSED_ON, text): None for text in _formed(tree) if text not in known})
    return [*dict.fromkeys([*found, *_declared()])]


def _declared() -> Iterator[Message]:
    """Yield what a Synchronizer's options and the table of those that exclude each other say."""
    from clcomm.sync import settings

    file = "clcomm/sync/settings.py"
    for name, option in vars(settings.SyncSettings).items():
        if isinstance(option, settings.Option) and option.expected:
            yield Message(file, "ArgumentError", f"{name}: expected {option.expected}, got {ANY}")
    for excluded, reasons in settings.EXCLUDED.items():
        for reason in reasons.values():
            yield Message(file, "ArgumentError", f"{excluded} with {ANY}{reason and f', {reason}'}")


def _calls(tree: ast.AST, classes: set[str]) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Yield each construction of an error with the function that it is in."""
    stack: list[tuple[ast.AST, ast.AST]] = [(tree, tree)]
    while stack:
        function, node = stack.pop()
        if isinstance(node, ast.Call) and _name(node.func) in classes:
            yield function, node
        inner = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        stack += [(inner, child) for child in ast.iter_child_nodes(node)]


def _formed(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of a message's form, docstrings and parts of longer texts left out."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.BinOp | ast.JoinedStr | ast.Constant) and (texts := _template(node)):
            yield from (text for text in texts if _FORM.search(text))
        else:
            stack += ast.iter_child_nodes(node)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _texts(call: ast.Call, function: ast.AST) -> list[str]:
    """Return the texts that an error's first argument can be; none for one that another function has made."""
    if not call.args:
        return []
    first = call.args[0]
    if isinstance(first, ast.Name):
        values = [
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and any(_name(target) == first.id for target in node.targets)
        ]
        return [text for value in values for text in _template(value)]
    return _template(first)


def _template(node: ast.expr) -> list[str]:
    """Return a text with … for each value in it; both texts of a conditional expression."""
    if isinstance(node, ast.IfExp):
        return _template(node.body) + _template(node.orelse)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [_tidy(node.value)]
    if isinstance(node, ast.JoinedStr):
        return [_tidy("".join(str(part.value) if isinstance(part, ast.Constant) else ANY for part in node.values))]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _template(node.left) or [ANY], _template(node.right) or [ANY]
        return [_tidy(a + b) for a in left for b in right]
    return []


def _tidy(text: str) -> str:
    return re.sub(rf"{ANY}(\s*{ANY})+", ANY, text).strip()
