"""README and docs: their programs run, their links lead somewhere, their option names exist."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from docs import options, stubs
from docs.extensions import public_names
from tests.floors import WINGS

ROOT = Path(__file__).resolve().parent.parent
DOCS = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts]
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]
README = (ROOT / "README.md").read_text()
OPTIONS = (ROOT / "docs" / "reference" / "options.md").read_text()
#: What stands before the Python blocks of a page that are parts of a program; other pages have whole programs.
PREAMBLES = {
    "README.md": """
import numpy as np
from clcomm import Communicator, Synchronizer
from clcomm.engine import CrossEntropyLoss, Linear, Tensor
from clcomm.optim import SGD
model, loss_fn = Linear(64, 10), CrossEntropyLoss()
optimizer = SGD(model, lr=0.1)
images, labels = Tensor(np.ones((8, 64), np.float32)), Tensor(np.zeros(8, np.int64))
""",
    **dict.fromkeys(
        ("docs/pipeline.md", "docs/tensor-parallel.md"),
        """
import numpy as np
from clcomm import Communicator, DistributedDataParallel, Mesh
from clcomm.engine import CrossEntropyLoss, Linear, ReLU, Sequential
from clcomm.optim import SGD
from clcomm.sync.sampler import DistributedSampler
comm, images, labels = Communicator(), np.ones((1600, 64), np.float32), np.zeros(1600, np.int32)
""",
    ),
    "docs/policies.md": """
import numpy as np
from clcomm import Communicator, Synchronizer
from clcomm.engine import CrossEntropyLoss, Linear, Tensor
from clcomm.optim import AdamW
comm, model, loss_fn = Communicator(), Linear(64, 10), CrossEntropyLoss()
optimizer = AdamW(model, lr=0.01)
batches = [(Tensor(np.ones((8, 64), np.float32)), Tensor(np.zeros(8, np.int64)))] * 60
""",
    "docs/tracing.md": """
from clcomm import Communicator
comm, device, batches = Communicator(), None, range(20)
""",
    "docs/weights.md": """
import clcomm.engine, numpy as np
from clcomm.engine import Flatten, Linear, Sequential, Tensor
model, tensor = Sequential(Flatten(), Linear(784, 10)), Tensor(np.ones((2, 3), np.float32))
""",
}
PROGRAMS = [
    (page, f"{PREAMBLES.get(page, '')}\n{program}".lstrip())
    for page in (path.relative_to(ROOT).as_posix() for path in PAGES)
    for program in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    if page != "docs/tutorial.md"  # tests/docs runs these, on several ranks
]


@pytest.mark.sampled(4)  # `make docs-check` runs all of them
@pytest.mark.parametrize(("page", "program"), PROGRAMS, ids=[page for page, _ in PROGRAMS])
def test_a_page_s_program_runs(page: str, program: str, tmp_path: Path) -> None:
    for module, extra in EXTRAS.items():
        if module in imported_by(program) and find_spec(module) is None:
            pytest.skip(f"{module} is not installed; pip install -e '.[{extra}]'")
    (tmp_path / "program.py").write_text(program)
    launcher = ["-m", "clcomm", "run", "-n", "1"] if "init_process_group" in program else []
    done = subprocess.run(
        [sys.executable, *launcher, "program.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ("'total_allreduce_calls': " in done.stdout) is ("get_communication_stats" in program)


#: The extras by the packages that programs need them for.
EXTRAS = {"torch": "torch", "sklearn": "digits", "netcl": "netcl", "tinygrad": "tinygrad", "jax": "jax",
          "prometheus_client": "prometheus"}  # fmt: skip
#: What our modules and functions import from the extras.
IMPORTED_BY_OURS = {
    "clcomm.torch": "torch",
    "clcomm.horovod": "torch",
    "clcomm.lizardist.engine": "torch",
    "clcomm.sync.adapters.torch": "torch",
    "clcomm.sync.adapters.netcl": "netcl",
    "clcomm.tinygrad": "tinygrad",
    "clcomm.jax": "jax",
    "clcomm.insight.exporters.prometheus": "prometheus_client",
}


def imported_by(program: str) -> set[str]:
    """Return the packages that a program imports, itself or through modules of ours that need an extra."""
    names = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    extras = {extra for ours, extra in IMPORTED_BY_OURS.items() for name in names if f"{name}.".startswith(f"{ours}.")}
    return extras | {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    ("program", "packages"),
    [
        ("import clcomm.engine, numpy as np, torch", {"clcomm", "numpy", "torch"}),
        ("def f():\n    from torch.nn import Linear", {"torch"}),
        ("import clcomm.horovod as hvd", {"clcomm", "torch"}),
        ("from clcomm import horovod, weights", {"clcomm", "torch"}),
        ("# import torch\nprint('import torch')", set()),
    ],
)
def test_imports_are_found_however_they_are_written(program: str, packages: set[str]) -> None:
    assert imported_by(program) == packages


def test_the_readme_s_calls_are_the_first_example_s_which_a_page_shows() -> None:
    """A page takes the whole program from its file; the README has the calls of clcomm, as they stand there."""
    docstring, _, program = (ROOT / "examples" / "loop.py").read_text().partition('"""\n\n')
    assert docstring.count("\n") == 0 and "](examples/loop.py)" in README
    shown = (ROOT / "docs" / "engine.md").read_text()
    assert "```{literalinclude} ../examples/loop.py\n:language: python\n:lines: 3-\n" in shown
    calls = re.findall(r"^ *((?:sync|optimizer)\.\w+\(.*?\))", program, re.MULTILINE)
    assert len(calls) == 4 and [call for call in calls if call not in README] == ["optimizer.zero_grad()"]


def test_the_readme_is_a_front_page() -> None:
    """Short, with a picture, and with commands that work as they stand once the environment is activated."""
    assert len(README.encode()) <= 7000 and README.count("\n") <= 122 and "![" in README
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    lines = [line for language, block in blocks if language == "sh" for line in block.splitlines()]
    commands = [line for line in lines if re.match(r"(mpiexec|clcomm|python|source) ", line)]
    assert len(commands) >= 4 and commands[0].startswith("source .venv/bin/activate") and "make mnist" in README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("http"):
            path, _, heading = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.is_file(), f"{page.name}: {target}"
            assert not heading or heading in headings(linked), f"{page.name}: {target}"


def test_public_names_are_those_of_the_list() -> None:
    """A name that comes or goes is a decision: it is seen in the change, and in the CHANGELOG if one goes."""
    listed = (ROOT / "docs" / "reference" / "names.txt").read_text().splitlines()
    found = public_names.listing()
    assert [line.partition(":")[0] for line in listed] == public_names.public_modules()
    missing = {*public_names.public_modules()} - {line.partition(":")[0] for line in found}
    assert [line for line in listed if line.partition(":")[0] not in missing] == found, (
        "with all extras installed: python -m docs.extensions.public_names > docs/reference/names.txt"
    )


def test_stubs_of_functions_are_those_of_the_registry() -> None:
    for path, text in stubs.stubs().items():
        assert path.read_text() == text, "python -m docs.stubs"


SOURCES = [
    path
    for folder in ("clcomm", "models", "training", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".cl", ".css", ".md")
]
FOLDERS = ("", "clcomm", *(f"clcomm/{wing}" for wing in WINGS), "docs", "tests")
#: Files that pages name and that are not this repository's: a program in a sample message, nccl-tests' manual, NumPy.
ELSEWHERE = {"demo/train.py", "doc/PERFORMANCE.md", "numpy/__init__.py"}


def test_named_files_and_modules_exist() -> None:
    texts = {page: page.read_text() for page in [*PAGES, *SOURCES, ROOT / "Makefile"] if page.name != "CHANGELOG.md"}
    missing = {page: missing_names(text) for page, text in texts.items()}
    assert len(texts) > 200 and {page: names for page, names in missing.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("see `clcomm/base/units.py` and `units.py`", []),
        ("see `sync/overlap.py` and docs/installation.md", []),
        ("see clcomm/gone.py.", ["clcomm/gone.py"]),
        ("`sync/gone.py:12`, `docs/gone.md#here`", ["docs/gone.md", "sync/gone.py"]),
        ("python -m examples.mnist, python3 -m pytest", []),
        ("python -m training.gone", ["training.gone"]),
        ("`clcomm.sync.overlap.Overlap`, `clcomm.optim`", []),
        ("`clcomm.gone.Overlap`", ["clcomm.gone.Overlap"]),
    ],
)
def test_a_made_up_name_is_found(text: str, missing: list[str]) -> None:
    assert missing_names(text) == missing


def missing_names(text: str) -> list[str]:
    """Return the files and modules of this repository that a text names and that do not exist."""
    files = set(re.findall(r"(?<![\w./<>-])((?:[\w-]+/)+[\w-]+\.(?:py|cl|css|md))\b", text)) - ELSEWHERE
    modules = re.findall(r"(?<![\w.])((?:clcomm|training|examples|benchmarks|models)(?:\.(?!md\b)\w+)+)", text)
    return sorted(
        {name for name in files if not any((ROOT / folder / name).is_file() for folder in FOLDERS)}
        | {name for name in modules if not is_module(name)}
    )


def is_module(dotted: str) -> bool:
    """Return whether a dotted name begins with a module or package, or is a name that its package has."""
    package, name, *_ = dotted.split(".")
    folder = ROOT / package
    exported = re.search(rf"\b{name}\b", (folder / "__init__.py").read_text())
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir() or exported is not None


def headings(page: Path) -> set[str]:
    """Return the anchors that a page's headings have on the usual hosts."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).strip().replace(" ", "-") for line in lines}


def test_a_page_has_every_option_of_the_example() -> None:
    assert options.page() == OPTIONS, "python -m docs.options"
    done = subprocess.run(
        [sys.executable, "-m", "examples.mnist", "--help-all"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    offered = set(re.findall(r"^ +(--[a-z][a-z-]+)", done.stdout, re.MULTILINE))
    assert len(offered) > 50 and offered <= set(re.findall(r"`(--[a-z][a-z-]+)", OPTIONS)) | {"--help-all"}


def test_every_field_of_a_report_is_documented(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["--model", "mlp", "--data", "synthetic", "--max-steps", "12", "--quiet", "--report", str(report)]
    subprocess.run([sys.executable, "-m", "examples.mnist", *arguments], cwd=ROOT, check=True, capture_output=True)
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "reports.md").read_text()))
    found = json.loads(report.read_text())
    settings = {f"--{name.replace('_', '-')}" for name in found["settings"]}
    assert settings <= set(re.findall(r"`(--[a-z][a-z-]+)", OPTIONS))
    assert fields({**found, "settings": None}) <= documented


def fields(value: object) -> set[str]:
    """Return all names in a JSON value."""
    if isinstance(value, dict):
        return set(value).union(*map(fields, value.values()))
    return set().union(*map(fields, value)) if isinstance(value, list) else set()
