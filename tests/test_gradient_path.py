"""docs/life-of-a-gradient.md: its files and functions exist, and a traced synchronisation runs just these."""

from __future__ import annotations

import ast
import gc
import re
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np
import pytest

import clcomm
from clcomm import Synchronizer
from clcomm.engine import CrossEntropyLoss, Linear, ReLU, Sequential, Tensor
from clcomm.optim import SGD

PACKAGE = Path(clcomm.__file__).parent
ROOT = PACKAGE.parent
BESIDE = "tests/proofs/gradient-path.md"
PAGE = (
    (ROOT / "docs" / "life-of-a-gradient.md")
    .read_text(encoding="utf-8")
    .replace(f"<!-- from {BESIDE} -->", (ROOT / BESIDE).read_text(encoding="utf-8"))
)
HEADINGS = ("The hot path", "Beside it", "With overlap", "Other cases")
MOST_FILES = 12
#: What a rank calls that waits for others, which depends on when they arrive.
WAITING = {
    "comm/collectives/in_flight.py",
    *(f"comm/transport/{name}.py" for name in ("futex", "rendezvous", "fused", "work_queue")),
}
#: What completes an all-reduce in which the rank waited in Python.
COMPLETING = {"comm/collectives/runner.py"}
#: How many files docs/architecture.md says that other calls cross.
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILES = {call: int(count) for call, count in re.findall(r"^\| `([\w.]+)` \| (\d+) \|", ARCHITECTURE, re.MULTILINE)}
#: What launches the kernel of an all-reduce where Python cannot call its function.
LAUNCHING = "engine/host_kernels.py"


class Hop(NamedTuple):
    file: str
    functions: list[str]


def hops(heading: str, page: str = PAGE) -> list[Hop]:
    """Return the columns "file" and "functions" of a section's table."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    titles, _, *rows = [[cell.strip() for cell in line.split("|")] for line in section.splitlines() if line[:1] == "|"]
    file, functions = titles.index("file"), titles.index("functions")
    return [Hop(row[file].strip("`"), re.findall(r"`([\w.]+)`", row[functions])) for row in rows]


@cache
def functions_of(file: str) -> dict[int, str]:
    """Return the qualified names of a file's functions by the line at which their code begins."""
    found: dict[int, str] = {}

    def visit(node: ast.AST, within: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = within
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                name = f"{within}.{child.name}".lstrip(".")
            if isinstance(child, ast.FunctionDef):
                found[min([child.lineno, *(each.lineno for each in child.decorator_list)])] = name
            visit(child, name)

    visit(ast.parse((PACKAGE / file).read_text(encoding="utf-8")), "")
    return found


def missing(page: str) -> list[str]:
    """Return the files and functions in a page's tables that do not exist."""
    found = []
    for heading in HEADINGS:
        for file, functions in hops(heading, page):
            if not (PACKAGE / file).is_file():
                found.append(file)
            else:
                found += [f"{file}: {name}" for name in functions if name not in functions_of(file).values()]
    return found


def test_every_named_function_exists():
    assert missing(PAGE) == []
    assert all(hop.functions for heading in HEADINGS for hop in hops(heading))
    assert len(hops("The hot path")) <= MOST_FILES and f"It crosses {len(hops('The hot path'))} files." in PAGE


def test_a_function_that_is_gone_is_found():
    assert missing(PAGE.replace("`LinearOp.backward`", "`LinearOp.gone`")) == ["engine/ops/matmul.py: LinearOp.gone"]
    assert missing(PAGE.replace("`sync/model_sync.py`", "`sync/gone.py`")) == ["sync/gone.py"]


class Traced(NamedTuple):
    files: list[str]
    functions: set[str]

    def misses(self, named: list[Hop]) -> list[str]:
        """Return the named functions that did not run; one that returns a function counts if that one ran."""
        return [f"{file}: {name}" for file, functions in named for name in functions
                if not any(f"{each}.".startswith(f"{file}: {name}.") for each in self.functions)]  # fmt: skip


def traced(call: Callable[[], object], within: str = "") -> Traced:
    """Return the package's files, in order, and functions that run in a call, those that only wait left out.

    within: only what is called by this function, if any is named.
    """
    files: dict[str, None] = {}
    functions: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(PACKAGE):
            return
        stack = [frame]
        while stack[-1].f_back is not None:
            stack.append(stack[-1].f_back)
        if any(each.f_code.co_filename.endswith("comm/transport/futex.py") for each in stack):
            return
        if within and all(name_of(each) != within for each in stack):
            return
        files.setdefault(path.relative_to(PACKAGE).as_posix())
        functions.add(name_of(frame))

    gc.disable()  # a collection runs functions that have nothing to do with the call
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return Traced(list(files), functions)


def name_of(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return ""
    file = path.relative_to(PACKAGE).as_posix()
    return f"{file}: {functions_of(file).get(frame.f_code.co_firstlineno, '')}"


def steps_of(sync: Synchronizer, device, within: str = "", late_s: float = 0.0) -> tuple[Traced, Traced, Traced]:
    """Return the traces of a step's backward, synchronisation and update, once what is prepared is prepared.

    late_s: how much later this rank synchronises.
    """
    model = Sequential(Linear(64, 128, device=device), ReLU(), Linear(128, 10, device=device))
    optimizer, loss_fn = SGD(model, 0.1, momentum=0.9), CrossEntropyLoss()
    sync.broadcast_parameters(model)
    x, y = Tensor(np.ones((8, 64), np.float32), device), Tensor(np.zeros(8, np.int32), device)
    for _ in range(4):
        loss = loss_fn(model(x), y)
        backward = traced(loss.backward, within)
        time.sleep(late_s)
        synchronisation = traced(lambda: sync.sync_gradients(model))
        step = traced(optimizer.step)
        optimizer.zero_grad()
    return backward, synchronisation, step


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("shares_cores", [False, True])
def test_the_hot_path_is_the_pages(auto, device, shares_cores):
    if not device.runs_in_caller:
        pytest.skip("this device computes by itself")
    auto.world.shared.rendezvous.polls = not shares_cores
    path = hops("The hot path")
    beside = {file for file, _ in hops("Beside it")} - {file for file, _ in path}  # some have functions of both
    backward, synchronisation, step = steps_of(Synchronizer(auto), device, "engine/ops/matmul.py: LinearOp.backward")
    first, *middle, last = [file for file, _ in path]
    assert backward.files[0] == first and step.files[0] == last
    assert [file for file in synchronisation.files if file not in beside] == middle
    everything = Traced([], backward.functions | synchronisation.functions | step.functions)
    crossed = {*backward.files, *synchronisation.files, *step.files}
    assert crossed - beside == {first, *middle, last}
    others = WAITING | COMPLETING | ({LAUNCHING} if device.takes_addresses else set())
    assert beside - crossed <= others
    assert everything.misses([*path, *(hop for hop in hops("Beside it") if hop.file not in others)]) == []


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("shares_cores", [False, True])
def test_ranks_that_wait_for_a_late_one_run_the_functions_of_the_page(auto, device, shares_cores):
    if not device.runs_in_caller:
        pytest.skip("this device computes by itself")
    auto.world.shared.rendezvous.polls = not shares_cores
    _, synchronisation, _ = steps_of(Synchronizer(auto), device, late_s=0.1 if auto.rank == 0 else 0.0)
    waiting = {hop.file: hop for hop in hops("Beside it")}
    own = waiting["comm/transport/work_queue.py" if shares_cores else "comm/transport/fused.py"]
    other = waiting["comm/transport/fused.py" if shares_cores else "comm/transport/work_queue.py"]
    if auto.rank:
        assert synchronisation.misses([own, waiting["comm/transport/rendezvous.py"]]) == []
    assert synchronisation.misses([other]) != []


@pytest.mark.mpi(min_size=2)
def test_overlap_runs_the_functions_of_the_page(auto, device):
    if not device.runs_in_caller:
        pytest.skip("this device computes by itself")
    backward, synchronisation, _ = steps_of(Synchronizer(auto, overlap=True, bucket_size="4KiB"), device)
    table = hops("With overlap")
    ended = next(index for index, hop in enumerate(table) if "Overlap.run" in hop.functions)
    started = [Hop(file, [name for name in names if name != "Handle.wait" and name != "Pending.wait"])
               for file, names in table[:ended]]  # fmt: skip
    folds = [hop for hop in started if "StartedReduction._fold_own" in hop.functions]
    assert backward.misses([hop for hop in started if hop not in folds]) == []
    assert synchronisation.misses(table[ended:]) == []
    assert Traced([], backward.functions | synchronisation.functions).misses(table) == []
