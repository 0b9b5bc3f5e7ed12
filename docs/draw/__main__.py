"""`python -m docs.draw` measures and draws, `--redraw` draws the last measurement again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from docs.draw import measure, pictures, plans, terminal

PLACE = Path(__file__).resolve().parent.parent / "drawings"
RUNS = {**measure.RUNS, "terminal": terminal.printed}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.draw", description=__doc__)
    parser.add_argument("--redraw", action="store_true", help="measure nothing")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), help="measure these alone")
    options = parser.parse_args()
    kept = PLACE / "measured.json"
    measured = json.loads(kept.read_text()) if kept.exists() else {}
    for name in [] if options.redraw else options.only or RUNS:
        print(f"measuring: {name}", flush=True)
        measured[name] = RUNS[name]()
        kept.write_text(json.dumps(measured, indent=None, separators=(",", ":")).replace('],["', '],\n["') + "\n")
    drawings = {**pictures.all_drawings(measured), **plans.all_drawings()}
    if "terminal" in measured:
        drawings["terminal"] = terminal.terminal(measured["terminal"])
    for name, drawing in drawings.items():
        (PLACE / f"{name}.svg").write_text(drawing)
        print(f"drawn: docs/drawings/{name}.svg")


if __name__ == "__main__":
    main()
