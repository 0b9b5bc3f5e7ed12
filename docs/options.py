"""`python -m docs.options` writes docs/reference/options.md: the options of examples.mnist, from its parser."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from training.command_line import parser
from training.options import TrainingOptions

PAGE = Path(__file__).resolve().parent / "reference" / "options.md"
HEAD = """# Options of the examples

`python -m examples.mnist` and the other examples take these options. `--help` shows the dozen that most runs need,
`--help-all` shows all. A program sets the same options by keyword:
`Session(TrainingOptions(model="mlp", epochs=1)).run()`, from [`training/options.py`](../../training/options.py) and
[`training/session.py`](../../training/session.py).
"""


def page() -> str:
    """Return the page's text."""
    made = parser("examples.mnist", "", TrainingOptions)
    groups = [group for group in made._action_groups if group.title not in ("options", "positional arguments")]
    parts = []
    for group in groups:
        rows = [f"| {name_of(each)} | {meaning_of(made, each)} |\n" for each in group._group_actions]
        parts.append(f"\n## {str(group.title).capitalize()}\n\n| option | meaning |\n|---|---|\n{''.join(rows)}")
    return HEAD + "".join(parts)


def name_of(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    values = action.metavar if action.choices is None else " or ".join(map(str, action.choices))
    return f"{names} `{values}`".replace("|", "\\|") if values else names


def meaning_of(made: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return an option's help, in which pages are links."""
    text = made._get_formatter()._expand_help(action).replace("|", "\\|") if action.help else ""
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](../\1.md)", text)


if __name__ == "__main__":
    PAGE.write_text(page())
