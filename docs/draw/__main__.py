"""`python -m docs.draw` measures and draws, `--redraw` draws the last measurement again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from docs.draw import measure, pictures, plans

PLACE = Path(__file__).resolve().parent.parent / "drawings"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.draw", description=__doc__)
    parser.add_argument("--redraw", action="store_true", help="measure nothing")
    parser.add_argument("--only", nargs="+", choices=list(measure.RUNS), help="measure these alone")
    options = parser.parse_args()
    kept = PLACE / "measured.json"
    measured = json.loads(kept.read_text()) if kept.exists() else {}
    for name in [] if options.redraw else options.only or measure.RUNS:
        print(f"measuring: {name}", flush=True)
        measured[name] = measure.RUNS[name]()
        kept.write_text(json.dumps(measured, indent=None, separators=(",", ":")).replace('],["', '],\n["') + "\n")
    for name, drawing in {**pictures.all_drawings(measured), **plans.all_drawings()}.items():
        (PLACE / f"{name}.svg").write_text(drawing)
        print(f"drawn: docs/drawings/{name}.svg")


if __name__ == "__main__":
    main()
