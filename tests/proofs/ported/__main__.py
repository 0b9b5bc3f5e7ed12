"""Compares the losses of scripts by others between PyTorch and the engine, from the same seed, step by step.

`python -m tests.proofs.ported CLONES [NAME ...]`: CLONES is a folder with clones of the repositories that `scripts.py`
names, as OWNER+NAME. A script runs as it is with PyTorch, with and without oneDNN, and with other imports with the
engine; datasets are drawn ones of the real ones' shapes. Prints a row for each script: steps compared, the largest
differences of a loss of the engine, and of PyTorch without oneDNN, and how many lines were changed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.proofs.ported.imports import moved
from tests.proofs.ported.scripts import SCRIPTS, Script

ROOT = Path(__file__).resolve().parents[3]
BAR, LIMIT_S = 1e-4, 600


def prepared(script: Script, clones: Path, folder: Path, side: str) -> tuple[Path, int]:
    """Copy a script's folder, with the engine's imports on its side; return the script and the lines changed."""
    source = clones / script.repository.replace("/", "+") / script.folder
    folder.parent.mkdir()
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".git"))
    file = script.file
    if script.driver:
        file = script.driver
        shutil.copy(Path(__file__).parent / "stand_ins" / script.driver, folder / file)
    stand_ins = folder.parent / "stand_ins"
    shutil.copytree(Path(__file__).parent / "stand_ins", stand_ins)
    changed = 0
    for path in (*folder.rglob("*.py"), *stand_ins.rglob("*.py")):
        text = path.read_text()
        for old, new in script.alike:
            text = text.replace(old, new)
        if side == "clcomm":
            text, lines = moved(text)
            for old, new in script.device:
                lines += text.count(old)
                text = text.replace(old, new)
            changed += lines if stand_ins not in path.parents and path.name != script.driver else 0
        path.write_text(text)
    (folder / "results").mkdir(exist_ok=True)
    texts = folder / "data" / "wikitext-2"
    texts.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(("train", "valid", "test")):
        (texts / f"{name}.txt").write_text(drawn_text(number, 40000 if name == "train" else 400))
    return folder / file, changed


def drawn_text(seed: int, words: int) -> str:
    """Return text of which each word depends on the one before."""
    rng = random.Random(seed)
    word, lines = 0, []
    for _ in range(words // 20):
        line = []
        for _ in range(20):
            word = (7 * word + rng.choice((1, 1, 1, 2, 5))) % 50
            line.append(f"w{word}")
        lines.append(" ".join(line))
    return "\n".join(lines)


def losses_of(script: Script, clones: Path, folder: Path, side: str) -> tuple[list[float], int, str]:
    """Run a script on one side; return its losses, the lines changed, and the last line of an error."""
    path, changed = prepared(script, clones, folder / side / "script", side)
    out = folder / f"{side}.json"
    command = [sys.executable, "-m", "tests.proofs.ported.side", side, str(path), str(out), str(script.steps)]
    ended = subprocess.run(
        [*command, *script.arguments],
        cwd=path.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CLCOMM_TRACEBACK": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if not out.exists():
        return [], changed, "\n".join(ended.stderr.strip().splitlines()[-6:])
    return json.loads(out.read_text()), changed, ""


def difference(first: float, second: float) -> float:
    """Return how far two losses are apart: of the larger one where it is above 1, else as they are."""
    return abs(first - second) / max(1.0, abs(first))


def main() -> int:
    clones, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    failed = 0
    print(f"{'script':40} steps    engine   PyTorch   lines")
    for script in SCRIPTS:
        if names and script.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            theirs, _, wrong = losses_of(script, clones, Path(folder), "torch")
            again, _, _ = losses_of(script, clones, Path(folder), "torch-otherwise")
            ours, changed, failure = losses_of(script, clones, Path(folder), "clcomm")
        apart = [difference(a, b) for a, b in zip(theirs, ours, strict=False)]
        is_right = bool(apart) and len(theirs) == len(ours) and max(apart) <= BAR
        failed += not is_right
        own = max([difference(a, b) for a, b in zip(theirs, again, strict=False)], default=float("nan"))
        largest = max(apart, default=float("nan"))
        print(f"{script.name:40} {len(apart):5} {largest:9.1e} {own:9.1e} {changed:7}", flush=True)
        for text in (wrong, failure):
            if text:
                print(f"    {text}".replace("\n", "\n    "), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
