"""The reference: which modules are public, docstrings for Sphinx, and the check that every public name is there.

A module of clcomm is public if it has an `__all__`, or is one of `WITHOUT_ALL`. Docstrings are written as comments are,
with `names` in single backticks; Sphinx expects reStructuredText, in which those would be roles.

On the site what stands between `<!-- public names of clcomm.engine -->` and `<!-- end -->`, which docs/listings.py
writes, is a module's names with their whole docstrings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clcomm.base.errors import ClcommError

ROOT = Path(__file__).resolve().parent.parent.parent
#: Public modules without `__all__`: each of their functions and classes is public.
WITHOUT_ALL = (
    "clcomm.base.errors", "clcomm.comm.collectives.same_start", "clcomm.comm.costs.costfile", "clcomm.engine.fold",
    "clcomm.parallel.audit", "clcomm.parallel.loss_scaling", "clcomm.sync.adapters.adapter",
    "clcomm.sync.adapters.netcl_optim", "clcomm.sync.balance", "clcomm.sync.compression", "clcomm.sync.decision",
    "clcomm.sync.distributed_optimizer", "clcomm.sync.elastic", "clcomm.sync.sampler",
)  # fmt: skip
_PART = re.compile(r"<!-- public names of ([\w.]+) -->.*?<!-- end -->", re.DOTALL)
#: Modules with other libraries' names, which describe what nothing else does.
LAST = {"clcomm.netcl"}
#: Classes with another one's name, to which no reference without a module leads.
NAMESAKES = {"clcomm.lizardist.Synchronizer"}
#: The names with which a module's section begins.
FIRST = ("Communicator", "Synchronizer", "DistributedDataParallel", "Mesh", "Tensor", "Module", "Device")
#: What the reference's modules import that the documentation's extra does not bring: Sphinx imitates the missing ones.
OPTIONAL = (
    "torch",
    "netcl",
    "tinygrad",
    "jax",
    "safetensors",
    "tensorboardX",
    "prometheus_client",
    "opentelemetry",
    "wandb",
)


def missing_packages() -> list[str]:
    """Return the optional packages that are not installed."""
    return [name for name in OPTIONAL if find_spec(name) is None]


@cache
def public_modules() -> list[str]:
    """Return the dotted names of all public modules, found without importing them."""
    found = set(WITHOUT_ALL)
    for path in (ROOT / "clcomm").rglob("*.py"):
        if any(_assigns_all(statement) for statement in ast.parse(path.read_text()).body):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(found)


def _assigns_all(statement: ast.stmt) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def listing() -> list[str]:
    """Return lines of a module and its public names, without the modules for which a package is missing."""
    return [f"{module}: {' '.join(sorted(public_names(module)))}" for module in importable()]


@cache
def importable() -> list[str]:
    """Return the public modules, without those for which a package is missing."""
    found = []
    for module in public_modules():
        with suppress(ImportError, ClcommError):
            import_module(module)
            found.append(module)
    return found


@cache
def public_names(module: str) -> list[str]:
    """Return a module's public names, submodules and imported packages left out."""
    loaded = import_module(module)
    names = getattr(loaded, "__all__", None) or [
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module and hasattr(value, "__qualname__")
    ]
    modules = type(ast)
    return [name for name in names if not name.startswith("__") and not isinstance(getattr(loaded, name), modules)]


def owner(module: str, name: str) -> str:
    """Return the module where a name is described: of those that have it `clcomm`, or else the one that made it."""
    value = _value_of(module, name)
    offering = [each for each in importable() if name in public_names(each) and _value_of(each, name) is value]
    made_in = getattr(value, "__module__", None)
    return min(offering, key=lambda each: (each != "clcomm", each != made_in, each in LAST, each.count("."), each))


def section(module: str) -> str:
    """Return a module's part of a reference page: its own names described, those described elsewhere listed."""
    names = public_names(module)
    own = [name for name in sorted_names(module) if owner(module, name) == module]
    others = [f"{{py:obj}}`{name} <{owner(module, name)}.{name}>`" for name in names if name not in own]
    lines = [f".. automodule:: {module}", "   :no-members:"]
    for name in own:
        lines += ["", *_directive(module, name)]
    text = "\n".join(["```{eval-rst}", *lines, "```", ""])
    return text + (f"\nAlso here: {', '.join(others)}.\n" if others else "")


def sorted_names(module: str) -> list[str]:
    """Return a module's public names in the reference's order."""
    return sorted(public_names(module), key=partial(_place, module))


def _place(module: str, name: str) -> tuple[int, int, str]:
    """Return what a module's names are sorted by: the most used ones, classes, functions, constants."""
    value = _value_of(module, name)
    kind = 0 if isinstance(value, type) else 1 if hasattr(value, "__qualname__") else 2
    return FIRST.index(name) if name in FIRST else len(FIRST), kind, name.lower()


def _directive(module: str, name: str) -> list[str]:
    value = _value_of(module, name)
    if isinstance(value, type):
        kind = "exception" if issubclass(value, BaseException) else "class"
        fields = "(...)" if hasattr(value, "_fields") else ""  # each is described below anyway
        lines = [f".. auto{kind}:: {module}.{name}{fields}", "   :members:"]
        lines += ["   :no-index:"] if f"{module}.{name}" in NAMESAKES else []
        is_protocol = getattr(value, "_is_protocol", False)  # autodoc cannot tell what one of these inherits
        return lines if is_protocol else [*lines, f"   :inherited-members: {_elsewhere(value)}"]
    if hasattr(value, "__qualname__"):
        return [f".. autofunction:: {module}.{name}"]
    lines = [f".. py:data:: {name}", f"   :module: {module}", f"   :type: {type(value).__name__}"]
    return lines + ([f"   :value: {value!r}"] if len(repr(value)) < 60 else [])


def _elsewhere(kind: type) -> str:
    """Return a class's bases whose members its own entry does not repeat: public ones, and other libraries'."""
    bases = [each for each in kind.__mro__[1:] if each in public_classes() or not each.__module__.startswith("clcomm")]
    return ", ".join(each.__name__ for each in bases)


@cache
def public_classes() -> set[type]:
    """Return the classes among all public names."""
    values = (_value_of(module, name) for module in importable() for name in public_names(module))
    return {value for value in values if isinstance(value, type)}


def undocumented(documented: set[str]) -> list[str]:
    """Return the public names that have no entry in the reference."""
    places = {f"{owner(module, name)}.{name}" for module in public_modules() for name in public_names(module)}
    return sorted(places - documented - NAMESAKES)


def _value_of(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def as_restructured_text(lines: list[str]) -> list[str]:
    """Return a docstring's lines for Sphinx: `names` as literals, no other markup, docs/*.md as links to pages."""
    return list(_converted(lines))


def _converted(lines: list[str]) -> Iterator[str]:
    for line in lines:
        parts = re.split(r"(`[^`]+`)", line)
        yield "".join(f"`{part}`" if part.startswith("`") else _escaped(part) for part in parts)


def _escaped(text: str) -> str:
    text = re.sub(r"([*|\\])", r"\\\1", text)
    text = re.sub(r"(?<=\w)_(?!\w)", r"\\_", text)
    return re.sub(r"docs/([\w-]+)\.md", r":doc:`/\1`", text)


def setup(app: Any) -> dict[str, Any]:
    from sphinx.ext.autodoc.mock import mock
    from sphinx.util import logging

    with mock(missing_packages()):
        for module in public_modules():
            import_module(module)

    attributes: dict[str, list[str]] = {}

    def on_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        lines[:] = as_restructured_text(lines)
        if what in ("attribute", "data", "property"):
            attributes[name] = list(lines)

    def after_napoleon(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        """Undo what it does to attributes: it takes what stands before a colon for a type."""
        lines[:] = attributes.pop(name, lines)

    def on_consistency(app: Any, env: Any) -> None:
        documented = set(env.get_domain("py").objects)
        for name in undocumented(documented):
            logging.getLogger(__name__).warning("reference: %s is public and has no entry", name)

    def on_source_read(app: Any, docname: str, source: list[str]) -> None:
        source[0] = _PART.sub(lambda found: section(found[1]), source[0])

    app.connect("source-read", on_source_read)
    app.connect("autodoc-process-docstring", on_docstring, priority=100)
    app.connect("autodoc-process-docstring", after_napoleon, priority=900)
    app.connect("env-check-consistency", on_consistency)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    print("\n".join(listing()))
