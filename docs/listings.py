"""`python -m docs.listings` fills the reference's pages with names and options, which a checkout can then show.

What stands between `<!-- public names of M -->` or `<!-- help of C -->` and `<!-- end -->` is written anew. The site
has the whole docstrings, and the help as printed, in its place.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

from clcomm.tools.cli import make_parser
from docs import options
from docs.extensions import public_names

FOLDER = Path(__file__).resolve().parent / "reference"
#: A part that is written: its kind, its name, what is there.
PART = re.compile(r"<!-- (public names|help) of ?([\w.-]*) -->\n(.*?)<!-- end -->", re.DOTALL)
_LONGEST_DEFAULT = 30


def filled(page: str) -> str:
    """Return a page with its parts written anew; those of modules for which a package is missing stay."""
    return PART.sub(lambda part: f"{part[0].partition(' -->')[0]} -->\n{_text(*part.groups())}<!-- end -->", page)


def _text(kind: str, name: str, before: str) -> str:
    if kind == "help":
        return "\n" + help_of(name) + "\n"
    return "\n" + names_of(name) + "\n" if name in public_names.importable() else before


def names_of(module: str) -> str:
    """Return a list of a module's own public names, with signatures and the first sentences of their docstrings."""
    own = [name for name in public_names.sorted_names(module) if public_names.owner(module, name) == module]
    lines = [line for name in own for line in _entry(name, getattr(import_module(module), name))]
    others = [f"`{name}`" for name in public_names.public_names(module) if name not in own]
    parts = ["\n".join(lines)] if lines else []
    return "\n\n".join([*parts, *([f"Described elsewhere: {', '.join(others)}."] if others else [])]) + "\n"


def _entry(name: str, value: Any) -> Iterator[str]:
    yield _line(f"{name}{_signature(value)}", value)
    if isinstance(value, type):
        for member, it in _members(value):
            yield "  " + _line(f"{member}{_signature(it)}", it)


def _line(code: str, value: Any) -> str:
    documented = isinstance(value, (type, property)) or callable(value)
    text = inspect.getdoc(value) if documented else ""
    first = re.split(r"(?<=[.])\s", " ".join((text or "").partition("\n\n")[0].split()))[0].rstrip(".:")
    return f"- `{code}`" + (f": {first}" if first else "")


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield a class's public methods and properties in the order of its source, those of its private bases too."""
    seen: set[str] = set()
    elsewhere = {base for each in kind.__mro__[1:] if each in public_names.public_classes() for base in each.__mro__}
    for each in kind.__mro__:
        if each in elsewhere or not each.__module__.startswith("clcomm"):
            continue
        for name, found in vars(each).items():
            value = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
            if name[0] != "_" and name not in seen and isinstance(value, (FunctionType, property)) and value.__doc__:
                seen.add(name)
                yield name, value


def _signature(value: Any) -> str:
    """Return a function's arguments, or those of a class's constructor, without types."""
    if isinstance(value, type):
        made = value.__dict__.get("__init__")
        value = None if issubclass(value, (enum.Enum, BaseException)) else made
    value = inspect.unwrap(value) if callable(value) else value
    if not isinstance(value, FunctionType) or not value.__module__.startswith("clcomm"):
        return ""
    parts: list[str] = []
    star = False
    for parameter in inspect.signature(value).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts, star = [*parts, "*"], True
        stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**" * (parameter.kind is parameter.VAR_KEYWORD)
        default = "" if parameter.default is parameter.empty else f"={_default(parameter.default)}"
        parts.append(f"{stars}{parameter.name}{default}")
    return f"({', '.join(parts)})"


def _default(value: Any) -> str:
    """Return a default as it is written, in any version of Python and NumPy."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= _LONGEST_DEFAULT and " at 0x" not in text and "\n" not in text else "..."


def help_of(command: str) -> str:
    """Return a sub-command's arguments and options as tables; the list of commands for ""."""
    parser = make_parser([command] if command else [])
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    if not command:
        rows = [f"| `clcomm {each.dest}` | {each.help} |\n" for each in commands._choices_actions]
        return f"| command | does |\n|---|---|\n{''.join(rows)}"
    made: argparse.ArgumentParser = commands.choices[command]
    rows = [
        f"| {options.name_of(each) or f'`{each.metavar or each.dest}`'} | {options.meaning_of(made, each)} |\n"
        for each in made._actions
        if each.help is not argparse.SUPPRESS and each.dest != "help"
    ]
    table = f"\n| argument | meaning |\n|---|---|\n{''.join(rows)}" if rows else ""
    return f"{' '.join((made.description or '').split())}\n{table}"


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.md")):
        path.write_text(filled(path.read_text()))
