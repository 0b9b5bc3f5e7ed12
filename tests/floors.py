"""The floors of the packages, and which imports breach them; works on sources alone, so it can be tested."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

PACKAGES = ("clcomm", "models", "training", "examples", "benchmarks")

#: Packages by floor, the lowest first; a package imports only from lower floors. Modules that lie directly in clcomm/
#: or training/ have no place of their own: each is as high as the highest package that it imports.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("clcomm/base/host",),
    ("clcomm/base/storage", "clcomm/base/console", "clcomm/base/flat_space", "clcomm/base/schedules"),
    ("clcomm/comm/transport", "clcomm/engine", "clcomm/insight/drawing", "clcomm/insight/exporters"),
    ("clcomm/comm/stats",),
    ("clcomm/comm/watch",),
    ("clcomm/comm/collectives",),
    (
        "clcomm/insight/trace",
        "clcomm/comm/costs",
        "clcomm/jobs/checkpoint",
        "clcomm/sync/compression",
        "clcomm/sync/policies",
        "clcomm/comm/tensors",
    ),
    ("clcomm/insight/measure", "clcomm/sync/adapters", "clcomm/engine/weights"),
    ("clcomm/sync", "clcomm/insight/summary", "clcomm/optim"),
    ("clcomm/sync/zero", "clcomm/jobs/launch", "clcomm/jobs/top"),
    (
        "clcomm/insight/report",
        "clcomm/lizardist",
        "clcomm/parallel",
        "clcomm/parallel/devices",
        "clcomm/tools/doctor",
        "clcomm/tools/verify",
    ),
    (
        *("clcomm/tools/commands", "clcomm/horovod", "clcomm/torch", "clcomm/netcl", "clcomm/tinygrad", "clcomm/jax"),
        *("clcomm/as_torch", "models"),
    ),
    ("training/data", "training/engines"),
    ("training/comparison",),
    ("examples", "benchmarks"),
)
#: Where modules may lie beside packages.
LOOSE = ("clcomm", "training")
#: What knows nothing of the engine, which is on their floor or below.
COMMUNICATION = (
    "clcomm/comm/transport/",
    "clcomm/comm/stats/",
    "clcomm/comm/watch/",
    "clcomm/comm/collectives/",
    "clcomm/comm/communicator.py",
)
#: The exception, with which a Communicator sums on its rank's CPU: (importing file, imported file).
SUMS_ON_CPU = "clcomm/comm/communicator.py", "clcomm/engine/fold.py"
#: How many modules may lie directly in clcomm/.
MOST_LOOSE = 12

ENGINE = "clcomm/engine/"
#: benchmarks/ measures what uses mpi4py itself.
MAY_IMPORT_MPI4PY = ("clcomm/comm/transport/mpi_", "benchmarks/")


@dataclass(frozen=True)
class Import:
    """One imported module, by its dotted name; `file` is that of this repository which it means, if any."""

    line: int
    module: str
    file: str | None
    for_types: bool


def package_of(path: str) -> str | None:
    """Return the package of FLOORS that a file belongs to; None for a file that belongs to none."""
    return next((name for floor in FLOORS for name in floor if path.startswith(name + "/")), None)


def is_loose(path: str) -> bool:
    """Return whether a file lies directly in a folder of LOOSE."""
    return path.rpartition("/")[0] in LOOSE


def floors_of(imports: Mapping[str, list[Import]]) -> dict[str, int]:
    """Return each file's floor: its package's, or for a loose module the highest that it reaches; -1 if none."""
    placed = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    floors: dict[str, int] = {}

    def visit(path: str, trail: tuple[str, ...]) -> int:
        package = package_of(path)
        if package is not None:
            return placed[package]
        if path not in floors and path not in trail:
            below = {each.file for each in imports[path] if each.file}
            floors[path] = max((visit(file, (*trail, path)) for file in below), default=-1)
        return floors.get(path, -1)

    return {path: visit(path, ()) for path in imports}


def breaches(sources: Mapping[str, str]) -> list[str]:
    """Return a line for each breach in the files, given as path: source."""
    imports = {path: list(imports_of(path, source, sources)) for path, source in sources.items()}
    floors = floors_of(imports)
    found = [
        f"{path}: is in no package of FLOORS; add it to tests/floors.py"
        for path in sources
        if package_of(path) is None and not is_loose(path)
    ]
    for path, its_imports in imports.items():
        for each in its_imports:
            found += (f"{path}:{each.line}: {problem}" for problem in _problems(path, each, floors))
    return found + _too_many(sources) + _cycles(imports)


def _too_many(sources: Mapping[str, str]) -> list[str]:
    loose = [path for path in sources if path.rpartition("/")[0] == "clcomm"]
    return [f"clcomm/: holds {len(loose)} modules, {MOST_LOOSE} at most"] if len(loose) > MOST_LOOSE else []


def _problems(path: str, imported: Import, floors: Mapping[str, int]) -> Iterator[str]:
    if imported.module.split(".")[0] == "mpi4py" and not path.startswith(MAY_IMPORT_MPI4PY):
        yield f"imports mpi4py; of clcomm only {MAY_IMPORT_MPI4PY[0].removeprefix('clcomm/')}*.py does"
    target = imported.file
    if target is None:
        if imported.module.split(".")[0] in PACKAGES:
            yield f"imports {imported.module}, which is no file here"
        return
    package = package_of(path)
    if package is not None and package != package_of(target) and floors[target] >= floors[path]:
        yield f"is on floor {floors[path]} and imports {target} of floor {floors[target]}"
    if path.startswith(COMMUNICATION) and target.startswith(ENGINE) and (path, target) != SUMS_ON_CPU:
        yield f"imports {target}: communication knows nothing of the engine"
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
        for inner in node.body:
            yield from _walk(inner, True)
        for inner in node.orelse:
            yield from _walk(inner, for_types)
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
    """Return a line for each ring of files that import each other, inside functions and for types included."""
    graph = {path: sorted({i.file for i in its if i.file} - {path}) for path, its in imports.items()}
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
