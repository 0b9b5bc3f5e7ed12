"""`python -m docs.tables` writes pages of docs/reference that are one table: the packages, and clcomm's variables."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from clcomm.base.host.variables import VARIABLES
from tests.floors import WINGS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = """# Packages by wing

A [wing](../architecture.md#wings) imports only from those above it. What a package is for is its docstring's first
sentence.

| wing | package | |
|---|---|---|
"""
OWN_VARIABLES = """# clcomm's environment variables

[Environment variables](../environment.md) says what the types mean, and which variables of other programs matter.

| variable | type | meaning | default |
|---|---|---|---|
"""


def packages() -> str:
    """Return the page of packages, from tests/floors.py and the docstrings of packages."""
    rows = [(wing, folder) for wing, folders in WINGS.items() for each in folders for folder in _packages_in(each)]
    return PACKAGES + "".join(f"| {wing} | `{folder}` | {_purpose(folder)} |\n" for wing, folder in rows)


def _packages_in(folder: str) -> list[str]:
    """Return a folder and the packages in it, those of the engine and of models' libraries as one."""
    inside = sorted(path.parent.name for path in (ROOT / folder).glob("*/__init__.py"))
    return [folder, *(f"{folder}/{name}" for name in inside if not folder.startswith("clcomm/engine"))]


def _purpose(package: str) -> str:
    docstring = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""
    return re.split(r"(?<=[.])\s|\n\n", docstring)[0].replace("\n", " ").replace("|", "\\|").rstrip(".")


def own_variables() -> str:
    """Return the page of clcomm's variables, from their table and the comment above each line of it."""
    source = (ROOT / "clcomm" / "base" / "host" / "variables.py").read_text()
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
