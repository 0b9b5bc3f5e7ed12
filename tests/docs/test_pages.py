"""The site's pages: variables, public names, the tutorial's programs, what stands for texts from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html import unescape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from clcomm.tools.commands.listing import COMMANDS
from docs import listings, tables
from docs.extensions import commands, llms, public_names, repository, results
from tests.faults.launch import clean_environment
from tests.release import newcomer

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if "_build" not in path.parts)
CODE = ("clcomm", "models", "training", "examples", "benchmarks")


def test_the_page_of_variables_has_those_of_the_code_and_no_other() -> None:
    used = {
        name
        for package in CODE
        for path in (ROOT / package).rglob("*.py")
        for name in re.findall(r"\bCLCOMM_[A-Z_]+\b", path.read_text())
    }
    table = (DOCS / "reference" / "variables.md").read_text()
    assert set(re.findall(r"^\| `(CLCOMM_[A-Z_]+)`", table, re.MULTILINE)) == used


@pytest.mark.parametrize("name", tables.PAGES)
def test_a_page_of_one_table_is_fresh(name: str) -> None:
    assert (DOCS / "reference" / name).read_text() == tables.PAGES[name](), "python -m docs.tables"


def test_every_page_is_in_one_table_of_contents_and_in_llms_txt() -> None:
    entries = []
    for page in ("index.md", "reference/index.md"):
        folder = Path(page).parent
        for block in re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
            names = [line for line in block.splitlines() if line and not line.startswith(":")]
            entries += [f"{(folder / name).as_posix()}.md" for name in names]
    assert sorted([*entries, "index.md"]) == PAGES
    linked = re.findall(r"\]\(docs/([\w/-]+\.md)\)", (ROOT / "llms.txt").read_text())
    parts = {f"reference/{name}.md" for name in ("core", "engine", "frameworks", "measuring", "parallel")}
    assert sorted(linked) == sorted({*PAGES} - {"index.md"} - parts)


def test_every_command_has_a_section() -> None:
    shown = re.findall(r"^<!-- help of ([\w-]+) -->$", (DOCS / "reference/commands.md").read_text(), re.MULTILINE)
    assert shown == [command.name for command in COMMANDS]
    assert all(commands.help_of(name).startswith(f"usage: clcomm {name}") for name in shown)


def test_llms_txt_names_the_site_s_copies() -> None:
    assert llms.for_site("- [A](docs/reference/a-b.md): c") == "- [A](_sources/reference/a-b.md.txt): c"


@pytest.mark.parametrize("page", sorted((DOCS / "reference").glob("*.md")), ids=lambda page: page.name)
def test_the_reference_can_be_read_in_a_checkout(page: Path) -> None:
    text = page.read_text()
    assert listings.filled(text) == text, "with all extras installed: python -m docs.listings"
    assert text.count("<!-- end -->") == len(re.findall("<!-- (?:public names|help) of", text))
    assert [part for *_, part in listings.PART.findall(text) if not part.strip()] == []


MADE, ROWS = object(), tuple(range(40))


def test_what_a_signature_is_does_not_depend_on_versions() -> None:
    def sample(
        x: int, y: float = 2.5, *, kind: type = float, made: object = MADE, rows: object = ROWS, **rest: int
    ) -> None:
        """Do it. And more."""

    sample.__module__ = "clcomm.sample"
    code = "sample(x, y=2.5, *, kind=float, made=..., rows=..., **rest)"
    assert [*listings._entry("sample", sample)] == [f"- `{code}`: Do it"]


# --- public names ---


#: Modules that an extra is needed for, by how their names start.
NEEDS = {
    "clcomm.torch": "torch", "clcomm.horovod": "torch", "clcomm.sync.adapters.netcl": "netcl",
    "clcomm.tinygrad": "tinygrad", "clcomm.jax": "jax",
}  # fmt: skip


def test_the_reference_has_every_public_module() -> None:
    pages = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    listed = re.findall(r"<!-- public names of ([\w.]+) -->", pages)
    assert sorted(listed) == public_names.public_modules()


@pytest.mark.parametrize("module", public_names.public_modules())
def test_public_names_have_docstrings(module: str) -> None:
    for start, package in NEEDS.items():
        if module.startswith(start):
            pytest.importorskip(package, reason=f"{package} is not installed")
    loaded = import_module(module)
    functions = [name for name in public_names.public_names(module) if hasattr(getattr(loaded, name), "__qualname__")]
    assert [name for name in functions if not (getattr(loaded, name).__doc__ or "").strip()] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("`x` and `f(*args)`", "``x`` and ``f(*args)``"),
        ("*args, a|b, backslash \\", "\\*args, a\\|b, backslash \\\\"),
        ("allreduce_ and x_y", "allreduce\\_ and x_y"),
        ("see docs/zero.md, `docs/zero.md`", "see :doc:`/zero`, ``docs/zero.md``"),
    ],
)
def test_docstrings_become_restructured_text(line: str, expected: str) -> None:
    assert public_names.as_restructured_text([line]) == [expected]


# --- texts from elsewhere ---


@pytest.mark.parametrize(
    ("docname", "text", "expected"),
    [
        ("numpy", "[a](../README.md#start)", "[a](index.md#start)"),
        ("lizardist", "[a](../benchmarks/RESULTS.md)", "[a](benchmarks.md)"),
        ("netcl", "[results]: ../benchmarks/RESULTS.md", "[results]: benchmarks.md"),
        ("architecture", "[a](../examples/loop.py)", "[a](sources.md#examplesloopy)".replace("loopy", "looppy")),
        ("reference/commands", "[a](../zero.md#x) [b](../../CHANGELOG.md)", "[a](../zero.md#x) [b](../changelog.md)"),
        ("mpi", "[a](zero.md#units) [b](https://x.org/../y)", "[a](zero.md#units) [b](https://x.org/../y)"),
        ("mpi", "```\n[a](../README.md)\n```", "```\n[a](../README.md)\n```"),
    ],
)
def test_links_that_leave_docs_lead_to_pages(docname: str, text: str, expected: str) -> None:
    assert repository.page_of_site(text, docname) == expected


def test_a_file_takes_its_mark_s_place() -> None:
    text = repository.page_of_site("<!-- from CHANGELOG.md -->", "changelog")
    assert "## 0.1.0" in text and "# Changelog\n" not in text
    assert "](dashboards.md)" in text and "](docs/" not in text and "](../" not in text
    with pytest.raises(FileNotFoundError):
        repository.page_of_site("<!-- from GONE.md -->", "changelog")


RESULTS = """# Results

## 2026-01-01: speed
`python -m benchmarks.peers`

| system | images/s | clcomm is (range) |
| --- | ---: | ---: |
| clcomm | 10 |  |
| other & co | 5 | 2.00x (1.50-2.50) |

## 2026-01-02: speed
`python -m benchmarks.peers --record`

| system | images/s |
| --- | ---: |
| clcomm | 11 |

## 2026-01-02: memory
| memory | median |
| --- | ---: |
| all | 5 |
"""


def test_results_become_sections_with_charts() -> None:
    page = results.page(RESULTS)
    assert re.findall("^#+ .*", page, re.MULTILINE) == [
        "## Memory", "### Run of 2026-01-02", "## Speed", "### Run of 2026-01-02",
    ]  # fmt: skip
    folded = page.partition("<summary>Run of 2026-01-01: <code>peers</code></summary>")[2]
    assert page.count("<details>") == page.count("</details>") == 1 and "other & co | 5" in folded
    assert page.count("<svg ") == 1 and "other &amp; co" in page and "2x (1.5 to 2.5)" in page


def test_a_page_of_two_files_has_their_sections_alone() -> None:
    page = results.page(
        results.sections("# Earlier results\n\n## 2025-01-01: speed\n`x`\n") + results.sections(RESULTS)
    )
    assert "# Results" not in page and "Earlier" not in page and page.count("Run of ") == 4


def test_results_in_short_are_in_the_results() -> None:
    recorded = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    drawn = unescape(results.in_short(recorded))
    assert all(name in drawn for name, *_ in results.IN_SHORT)
    found = re.search(r"MLP, 4 ranks, to DDP, clcomm to the other: ([\d.]+x) \(([\d.]+) to ([\d.]+)\)", drawn)
    assert found is not None
    ratio, least, most = found.groups()
    assert "| PyTorch DDP, gloo | 4 | 1 |" in recorded and f"{ratio} ({least}-{most})" in recorded
    assert f"| MLP, 4 ranks, to DDP | {ratio} | {least} to {most} | `benchmarks.peers --model convnet mlp` |" in drawn
    with pytest.raises(LookupError, match="peers --model convnet mlp: no 'PyTorch DDP, gloo'"):
        results.in_short(RESULTS)


def test_drawings_name_what_their_pages_name() -> None:
    page = (DOCS / "life-of-a-gradient.md").read_text() + (ROOT / "tests/proofs/gradient-path.md").read_text()
    drawn = re.findall(r"\b[A-Z]\w+\.\w+\b", (DOCS / "drawings" / "life-of-a-gradient.svg").read_text())
    assert len(drawn) > 3 and [name for name in drawn if name not in page] == []
    wings = re.findall(r"^\| \*\*(\w+)\*\* \|", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    rooms = re.findall(r"<title>(\w+)</title>", (DOCS / "drawings" / "wings.svg").read_text())
    assert len(rooms) == 9 and rooms == wings, "python -m docs.draw --redraw"


def cut_tables(text: str) -> list[str]:
    """Return the rows that an empty line cuts off from their table: a page would show them as text."""
    text = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\|.*\n\n(\|.*)\n(.*)", text, re.MULTILINE)
    return [row for row, below in rows if not re.fullmatch(r"[|:\s-]+", below)]


def test_no_empty_line_cuts_a_table() -> None:
    texts = [(DOCS / page).read_text() for page in PAGES]
    assert [row for text in (*texts, (ROOT / "README.md").read_text()) for row in cut_tables(text)] == []
    assert cut_tables("| a |\n|---|\n| 1 |\n\n| 2 |\n") == ["| 2 |"]
    assert cut_tables("| a |\n|---|\n| 1 |\n\n| b |\n|---|\n| 2 |\n") == []


# --- the tutorial ---


def test_the_tutorial_runs_as_written(tmp_path: Path) -> None:
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", "")])
    if shutil.which("mpiexec", path=path) is None or find_spec("sklearn") is None:
        pytest.skip("mpiexec or scikit-learn is not installed; pip install -e '.[mnist]'")
    typed = newcomer.commands((DOCS / "tutorial.md").read_text())
    done = subprocess.run(
        ["bash", "-c", newcomer.script(typed, "")],
        cwd=tmp_path, env=clean_environment(PATH=path), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    printed = done.stdout + done.stderr
    assert newcomer.differences(typed, done.stdout, done.returncode) == [], printed
    assert "1 ranks: test accuracy" in printed
    hashes = re.findall(r"^2 ranks: test accuracy \d\d\.\d%, parameters (\w{16})$", printed, re.MULTILINE)
    assert len(hashes) == 4 and len(set(hashes)) == 1, "buckets of any size"
    assert (tmp_path / "timeline.json.gz").is_file()
    assert (tmp_path / "run.html").is_file() and "three layers, 2 ranks" in printed
    assert "bucket_size: expected a positive number of bytes" in printed and "exit code 2" in printed
