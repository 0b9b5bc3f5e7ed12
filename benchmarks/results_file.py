"""RESULTS.md: of each command on a machine the newest run; HISTORY.md has those before it.

At its top are a row for each of them and the bars that they missed. Options that only set how long is measured make no
other command.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).with_name("RESULTS.md")
HISTORY = "HISTORY.md"
_LENGTHS = re.compile(r" --(?:record|(?:windows|window-s|settle-s) \S+)")
_SECTION = re.compile(r"## (?P<date>\S+): (?P<title>.+)\n\n`(?P<command>.+)`\n\n(?P<machine>.+?)(?:;|\n|\Z)")
_HEADING = """# Results

The newest run of each command on a machine; [HISTORY.md](HISTORY.md) has those before it. Ratios are what counts: each
section was measured side by side, in one run. Bars are what a change was asked to reach."""


class Section(NamedTuple):
    """A run, as the file has it."""

    text: str
    date: str
    command: str
    machine: str

    @classmethod
    def of(cls, text: str) -> Section:
        """Read a section; raises ValueError where it has no date, command and machine at its top."""
        found = _SECTION.match(text)
        if not found:
            raise ValueError(f"expected '## date: title', a command and a machine, got {text[:80]!r}")
        return cls(text.strip(), found["date"], found["command"], found["machine"])

    @property
    def key(self) -> tuple[str, str]:
        """The command, without how long it measures, and the machine."""
        return _LENGTHS.sub("", self.command), self.machine

    def bars(self, state: str) -> list[str]:
        """Return the lines of the bars that were "reached" or "missed"."""
        ending = f" asked for: {state}"
        return [
            line[2 : -len(ending)] for line in self.text.splitlines() if line.startswith("- ") and line.endswith(ending)
        ]


def record(text: str, path: Path = RESULTS) -> None:
    """Add a run's section to a file of results; an earlier one of that command and machine moves to HISTORY.md."""
    new, sections = Section.of(text), read(path)
    older = [section for section in sections if section.key == new.key and section.text != new.text]
    _write(path, [*(section for section in sections if section.key != new.key), new])
    if older:
        history = path.with_name(HISTORY)
        begin = history.read_text(encoding="utf-8").strip() if history.exists() else "# Earlier results"
        parts = [begin, *(section.text for section in older)]
        history.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def read(path: Path) -> list[Section]:
    """Return the sections of a file of results, [] if it is missing."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [Section.of(part) for part in re.split(r"(?m)^(?=## \d)", text)[1:]]


def _write(path: Path, sections: list[Section]) -> None:
    parts = [_HEADING, _missed(sections), _rows(sections), *(section.text for section in sections)]
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def _missed(sections: list[Section]) -> str:
    lines = [
        f"- `{_short(section)}`, {section.machine}: {line}" for section in sections for line in section.bars("missed")
    ]
    return "\n\n".join(("**Missed bars**", "\n".join(lines))) if lines else ""


def _rows(sections: list[Section]) -> str:
    rows = ["| command | machine | date | bars reached |", "| --- | --- | --- | ---: |"]
    for section in sections:
        reached, missed = (len(section.bars(state)) for state in ("reached", "missed"))
        rows.append(f"| `{_short(section)}` | {section.machine} | {section.date} | {reached} of {reached + missed} |")
    return "\n".join(rows)


def _short(section: Section) -> str:
    return section.key[0].removeprefix("python -m benchmarks.")
