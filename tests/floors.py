"""The wings of clcomm and what stands on it, and which imports breach their order; works on sources alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

PACKAGES = ("clcomm", "models", "training", "examples", "benchmarks")

#: The nine wings and the packages that stand on clcomm, the lowest first: each imports from those before it only. The
#: doors are the packages that users of other libraries type.
WINGS: dict[str, tuple[str, ...]] = {
    "base": ("clcomm/base",),
    "engine": ("clcomm/engine", "clcomm/optim"),
    "comm": ("clcomm/comm",),
    "jobs": ("clcomm/jobs",),
    "sync": ("clcomm/sync",),
    "parallel": ("clcomm/parallel",),
    "insight": ("clcomm/insight",),
    "doors": (
        *("clcomm/torch", "clcomm/horovod", "clcomm/jax", "clcomm/tinygrad", "clcomm/netcl", "clcomm/lizardist"),
        "clcomm/as_torch",
    ),
    "tools": ("clcomm/tools",),
    "models": ("models",),
    "training": ("training",),
    "examples": ("examples", "benchmarks"),
}
ORDER = list(WINGS)
#: Modules of clcomm that belong to no wing: they hold names for users, and import at first use.
LOOSE = ("clcomm/__init__.py", "clcomm/guard.py", "clcomm/__main__.py", "clcomm/_moved.py", "clcomm/_version.py")
#: The one file of communication that imports the engine, with which a Communicator sums on its rank's CPU.
SUMS_ON_CPU = "clcomm/comm/collectives/all_reduce.py", "clcomm/engine/fold.py"

ENGINE = "clcomm/engine/"
#: benchmarks/ measures what uses mpi4py itself, and one example shows the whole with nothing else.
MAY_IMPORT_MPI4PY = ("clcomm/comm/transport/mpi_", "benchmarks/", "examples/core.py")


@dataclass(frozen=True)
class Import:
    """One imported module, by its dotted name; `file` is that of this repository which it means, if any."""

    line: int
    module: str
    file: str | None
    for_types: bool


def wing_of(path: str) -> str | None:
    """Return the wing that a file belongs to; None for one that belongs to none."""
    return next((wing for wing, folders in WINGS.items() for each in folders if path.startswith(each + "/")), None)


def breaches(sources: Mapping[str, str]) -> list[str]:
    """Return a line for each breach in the files, given as path: source."""
    imports = {path: list(imports_of(path, source, sources)) for path, source in sources.items()}
    found = []
    for path, its_imports in imports.items():
        if wing_of(path) is None and path not in LOOSE:
            found.append(f"{path}: is in no wing; tests/floors.py lists them")
        for each in its_imports:
            found += (f"{path}:{each.line}: {problem}" for problem in _problems(path, each))
    return found + _cycles(imports)


def _problems(path: str, imported: Import) -> Iterator[str]:
    if imported.module.split(".")[0] == "mpi4py" and not path.startswith(MAY_IMPORT_MPI4PY):
        yield "imports mpi4py; of clcomm only comm/transport/mpi_*.py does"
    target = imported.file
    if target is None:
        if imported.module.split(".")[0] in PACKAGES:
            yield f"imports {imported.module}, which is no file here"
        return
    own, other = wing_of(path), wing_of(target)
    if own and other and ORDER.index(other) > ORDER.index(own):
        yield f"imports {target}: {own} comes before {other}"
    if own == "comm" and target.startswith(ENGINE) and (path, target) != SUMS_ON_CPU:
        yield f"imports {target}: communication knows nothing of the engine"
    if own == "models" and not target.startswith(("models/", ENGINE)):
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
