"""README and docs: their programs run, their links lead somewhere, their option names exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_readme_program_runs(number: int) -> None:
    program = PROGRAMS[number]
    if "import torch" in program:
        pytest.importorskip("torch", reason="PyTorch is not installed; pip install 'clcomm[torch]'")
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "'total_allreduce_calls': " in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("http"):
            path, _, heading = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.is_file(), f"{page.name}: {target}"
            assert not heading or heading in headings(linked), f"{page.name}: {target}"


def headings(page: Path) -> set[str]:
    """Return the anchors that a page's headings have on the usual hosts."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).strip().replace(" ", "-") for line in lines}


def test_readme_lists_every_option_of_the_example() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.mnist", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    offered = set(re.findall(r"--[a-z][a-z-]+", done.stdout)) - {"--help"}
    listed = set(re.findall(r"`(--[a-z][a-z-]+)", README.split("## Options")[1]))
    assert offered == listed


def test_every_field_of_a_report_is_documented(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["--model", "mlp", "--data", "synthetic", "--max-steps", "12", "--quiet", "--report", str(report)]
    subprocess.run([sys.executable, "-m", "examples.mnist", *arguments], cwd=ROOT, check=True, capture_output=True)
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "reports.md").read_text()))
    found = json.loads(report.read_text())
    settings = {f"--{name.replace('_', '-')}" for name in found["settings"]}
    assert settings <= set(re.findall(r"`(--[a-z][a-z-]+)", README))
    assert fields({**found, "settings": None}) <= documented


def fields(value: object) -> set[str]:
    """Return all names in a JSON value."""
    if isinstance(value, dict):
        return set(value).union(*map(fields, value.values()))
    return set().union(*map(fields, value)) if isinstance(value, list) else set()
