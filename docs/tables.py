"""`python -m docs.tables` writes pages of docs/reference that are one table: the packages, and clcomm's variables."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from clcomm.base.host.variables import VARIABLES
from tests.floors import FLOORS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = """# Packages by floor

A package imports only from [floors](../architecture.md#floors) below its own. What each is for is its docstring's
first sentence.

| floor | package | |
|---|---|---|
"""
OWN_VARIABLES = """# clcomm's environment variables

[Environment variables](../environment.md) says what the types mean, and which variables of other programs matter.

| variable | type | meaning | default |
|---|---|---|---|
"""


def packages() -> str:
    """Return the page of packages, from tests/floors.py and the packages' docstrings."""
    rows = [(floor, name, _purpose(name)) for floor, names in enumerate(FLOORS) for name in names]
    return PACKAGES + "".join(f"| {floor} | `{name}` | {purpose} |\n" for floor, name, purpose in rows)


def _purpose(package: str) -> str:
    docstring = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""
    return re.split(r"(?<=[.])\s|\n\n", docstring)[0].replace("\n", " ").replace("|", "\\|").rstrip(".")


def own_variables() -> str:
    """Return the page of clcomm's variables, from their table and the comment above each line of it."""
    source = (ROOT / "clcomm" / "host" / "variables.py").read_text()
    comments = dict(re.findall(r'((?:^    # .*\n)+)    "(CLCOMM_\w+)": ', source, re.MULTILINE))
    meanings = {name: " ".join(comment.replace("    # ", "").split()) for comment, name in comments.items()}
    rows = [
        f"| `{name}` | {variable.type} | {_with_links(meanings[name])} | {variable.default} |\n"
        for name, variable in sorted(VARIABLES.items())
    ]
    return OWN_VARIABLES + "".join(rows)


def _with_links(text: str) -> str:
    return re.sub(r"docs/([\w-]+)\.md(#[\w-]+)?", r"[\1](../\1.md\2)", text).rstrip(".")


#: The pages, and what makes their texts.
PAGES = {"packages.md": packages, "variables.md": own_variables}


if __name__ == "__main__":
    for name, text in PAGES.items():
        (ROOT / "docs" / "reference" / name).write_text(text())
