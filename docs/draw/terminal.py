"""The picture of a terminal in README.md: two commands, and the lines that they print."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from clcomm.jobs.launch.mpiexec import find_mpiexec

ROOT = Path(__file__).resolve().parents[2]
#: The width of the terminal in characters.
COLUMNS = 92
#: Each command as it is typed, and how many of its first lines are shown.
COMMANDS = (("mpiexec -n 4 python -m examples.mnist --quiet --report run.json", 9), ("clcomm report run.json", 12))
_FONT, _LINE, _CHARACTER, _EDGE, _BAR = 12, 17, 7.25, 14, 26
_INK, _GROUND, _TYPED, _BUTTONS = "#e6e6e6", "#1e2227", "#8fd694", ("#ff5f57", "#febc2e", "#28c840")


def printed() -> list[list[str]]:
    """Return the commands and their lines, run on this machine."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(COLUMNS)}
    words = {"mpiexec": [find_mpiexec().path], "python": [sys.executable], "clcomm": [sys.executable, "-m", "clcomm"]}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for command, shown in COMMANDS:
            started = [part for word in command.split() for part in words.get(word, [word])]
            done = subprocess.run(
                started, check=True, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, timeout=300
            )
            lines = [line for line in done.stdout.rstrip().splitlines() if not line.startswith("data: ")]  # a path
            found.append([command, *(line.rstrip() for line in lines[:shown]), *["..."] * (len(lines) > shown)])
    return found


def terminal(commands: list[list[str]]) -> str:
    """Return a window of a terminal as a scalable file, the same in both schemes."""
    rows, y = [], float(_BAR + _EDGE)
    for command, *lines in commands:
        broken = [line[at : at + COLUMNS] for line in lines for at in range(0, len(line) or 1, COLUMNS)]
        for number, line in enumerate([f"$ {command}", *broken]):
            ink = _INK if number else _TYPED
            rows.append(f'<text x="{_EDGE}" y="{y:.0f}" fill="{ink}" xml:space="preserve">{escape(line)}</text>')
            y += _LINE
        y += _LINE / 2
    width, height = COLUMNS * _CHARACTER + 2 * _EDGE, y - _LINE
    buttons = "".join(
        f'<circle cx="{_EDGE + 4 + 18 * number}" cy="14" r="5" fill="{colour}"/>'
        for number, colour in enumerate(_BUTTONS)
    )
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    font = f'font-family="ui-monospace,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="{_FONT}"'
    ground = f'<rect width="100%" height="100%" rx="8" fill="{_GROUND}"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{ground}{buttons}{"".join(rows)}</svg>\n'
