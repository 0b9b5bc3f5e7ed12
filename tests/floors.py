"""Which floor each file is on, and which imports breach the floors; works on sources alone, so it can be tested."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

PACKAGES = ("clcomm", "models", "training", "examples", "benchmarks")

#: Floor of each file, the first pattern that fits: a folder ends in a slash. What fits none has to be placed here.
#: One to a line and in order, so that branches which place files merge.
FLOORS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (
        0,
        (
            "clcomm/_version.py",
            "clcomm/bounded_end.py",
            "clcomm/buckets.py",
            "clcomm/cache.py",
            "clcomm/common_memory.py",
            "clcomm/console.py",
            "clcomm/errors.py",
            "clcomm/exit_code.py",
            "clcomm/files.py",
            "clcomm/hashing.py",
            "clcomm/host_memory.py",
            "clcomm/intervals.py",
            "clcomm/layout.py",
            "clcomm/limits.py",
            "clcomm/lookout.py",
            "clcomm/lookout_process.py",
            "clcomm/option_types.py",
            "clcomm/place.py",
            "clcomm/private.py",
            "clcomm/progress.py",
            "clcomm/restarts.py",
            "clcomm/same_start.py",
            "clcomm/scratch.py",
            "clcomm/terminal.py",
            "clcomm/text_table.py",
            "clcomm/transport/",
            "clcomm/units.py",
            "clcomm/writer_lock.py",
        ),
    ),
    (
        1,
        (
            "clcomm/all_reduce.py",
            "clcomm/arguments.py",
            "clcomm/bucket_tuning.py",
            "clcomm/call.py",
            "clcomm/collective_cases.py",
            "clcomm/collectives.py",
            "clcomm/communicator.py",
            "clcomm/cores.py",
            "clcomm/costfile.py",
            "clcomm/costmodel.py",
            "clcomm/decision.py",
            "clcomm/engine/",
            "clcomm/events.py",
            "clcomm/exits.py",
            "clcomm/flight_recorder.py",
            "clcomm/forecast.py",
            "clcomm/handle.py",
            "clcomm/histogram.py",
            "clcomm/holdings.py",
            "clcomm/in_flight.py",
            "clcomm/job.py",
            "clcomm/lizardist_calls.py",
            "clcomm/measure.py",
            "clcomm/objects.py",
            "clcomm/other_hosts.py",
            "clcomm/outputs.py",
            "clcomm/overtime.py",
            "clcomm/running.py",
            "clcomm/separation.py",
            "clcomm/stall.py",
            "clcomm/start_watch.py",
            "clcomm/stats.py",
            "clcomm/stats_table.py",
            "clcomm/tally.py",
            "clcomm/trace/",
            "clcomm/versions.py",
            "clcomm/visits.py",
            "clcomm/watchdog.py",
            "clcomm/world.py",
        ),
    ),
    (
        2,
        (
            "clcomm/__init__.py",
            "clcomm/__main__.py",
            "clcomm/adapters/",
            "clcomm/agreement.py",
            "clcomm/auto_buckets.py",
            "clcomm/averaging.py",
            "clcomm/bench.py",
            "clcomm/bench_report.py",
            "clcomm/bucket_plan.py",
            "clcomm/checkpoint.py",
            "clcomm/checkpoint_series.py",
            "clcomm/cli.py",
            "clcomm/clipping.py",
            "clcomm/commands/",
            "clcomm/completion_order.py",
            "clcomm/compression/",
            "clcomm/distributed_optimizer.py",
            "clcomm/divergence.py",
            "clcomm/elastic.py",
            "clcomm/finiteness.py",
            "clcomm/join.py",
            "clcomm/lizardist/",
            "clcomm/optim.py",
            "clcomm/optimizer.py",
            "clcomm/overlap.py",
            "clcomm/overlap_choice.py",
            "clcomm/plot.py",
            "clcomm/replica.py",
            "clcomm/report/",
            "clcomm/sampler.py",
            "clcomm/shared_space.py",
            "clcomm/summary/",
            "clcomm/sums.py",
            "clcomm/synchronizer.py",
            "clcomm/tune.py",
            "clcomm/tune_report.py",
        ),
    ),
    (
        3,
        (
            "models/",
            "training/",
        ),
    ),
    (
        4,
        (
            "benchmarks/",
            "examples/",
        ),
    ),
)

ENGINE = "clcomm/engine/"
#: benchmarks/ measures what uses mpi4py itself.
MAY_IMPORT_MPI4PY = ("clcomm/transport/mpi.py", "benchmarks/")
#: Its imports wait for a model of their library, so they close no cycle.
LAZY = ("clcomm/adapters/__init__.py",)


@dataclass(frozen=True)
class Import:
    """One imported module, by its dotted name; `file` is that of this repository which it means, if any."""

    line: int
    module: str
    file: str | None
    for_types: bool


def floor_of(path: str) -> int | None:
    """Return a file's floor; None when nobody has placed it."""
    for floor, patterns in FLOORS:
        if any(path.startswith(p) if p.endswith("/") else path == p for p in patterns):
            return floor
    return None


def breaches(sources: Mapping[str, str]) -> list[str]:
    """Return a line for each breach in the files, given as path: source."""
    imports = {path: list(imports_of(path, source, sources)) for path, source in sources.items()}
    found = [f"{path}: is on no floor; place it in tests/floors.py" for path in sources if floor_of(path) is None]
    for path, its_imports in imports.items():
        for each in its_imports:
            found += (f"{path}:{each.line}: {problem}" for problem in _problems(path, each))
    return found + _cycles(imports)


def _problems(path: str, imported: Import) -> Iterator[str]:
    if imported.module.split(".")[0] == "mpi4py" and not path.startswith(MAY_IMPORT_MPI4PY):
        yield "imports mpi4py; of clcomm only transport/mpi.py does"
    target = imported.file
    if target is None:
        if imported.module.split(".")[0] in PACKAGES:
            yield f"imports {imported.module}, which is no file here"
        return
    own, theirs = floor_of(path), floor_of(target)
    if own is not None and theirs is not None and theirs > own:
        yield f"is on floor {own} and imports {target} of floor {theirs}"
    if own == theirs == 1 and path.startswith(ENGINE) != target.startswith(ENGINE):
        yield f"imports {target}: the engine and the Communicator's side know nothing of each other"
    if path.startswith("models/") and not target.startswith(("models/", ENGINE)):
        yield f"imports {target}: models know the engine alone"


def imports_of(path: str, source: str, files: Mapping[str, str]) -> Iterator[Import]:
    """Yield everything that a file imports, inside functions too."""
    for node, for_types in _walk(ast.parse(source, path), False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, _file_of(alias.name, files), for_types)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(path, node)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                module = whole if _file_of(whole, files) else base
                yield Import(node.lineno, module, _file_of(module, files), for_types)


def _walk(node: ast.AST, for_types: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, for_types
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _walk(child, True)
        for child in node.orelse:
            yield from _walk(child, for_types)
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, for_types)


def _absolute(path: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = path.removesuffix(".py").split("/")[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def _file_of(module: str, files: Mapping[str, str]) -> str | None:
    stem = module.replace(".", "/")
    return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in files), None)


def _cycles(imports: Mapping[str, list[Import]]) -> list[str]:
    """Return a line for each ring of files that import each other when they run, inside functions included."""
    graph = {
        path: [] if path in LAZY else sorted({i.file for i in its if i.file and not i.for_types} - {path})
        for path, its in imports.items()
    }
    found: dict[frozenset[str], str] = {}
    done: set[str] = set()

    def visit(path: str, trail: list[str]) -> None:
        if path in trail:
            ring = trail[trail.index(path) :]
            found.setdefault(frozenset(ring), f"import cycle: {' -> '.join([*ring, path])}")
        elif path not in done:
            for target in graph[path]:
                visit(target, [*trail, path])
            done.add(path)

    for path in sorted(graph):
        visit(path, [])
    return list(found.values())
