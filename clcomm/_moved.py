"""Modules that have moved: their old names lead to the same modules, and warn for two minor versions."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # importlib.abc takes longer to import than all of `clcomm`

#: The version in which the old names go.
UNTIL = "0.3"
_MOVED = {
    "base": "errors flat_space schedules", "comm": "collectives communicator costs stats", "engine": "weights",
    "insight": "exporters report summary trace", "jobs": "checkpoint", "parallel": "devices",
    "sync": "adapters clipping compression distributed_optimizer elastic sampler synchronizer",
}  # fmt: skip
#: An old name in clcomm, and the new one.
MOVED = {name: f"{wing}.{name}" for wing, names in _MOVED.items() for name in names.split()} | {"job": "comm.watch"}


class Finder(Loader):
    """Finds `clcomm.errors` as `clcomm.base.errors`: one module with two names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        name, dot, inner = rest.partition(".")
        if package != "clcomm" or name not in MOVED:
            return None
        new = f"clcomm.{MOVED[name]}{dot}{inner}"
        if not inner:
            warnings.warn(f"{fullname}: goes in clcomm {UNTIL}; use {new}", DeprecationWarning, stacklevel=2)
        return ModuleSpec(fullname, self, origin=new)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(str(spec.origin))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module back its own specification, which the import system has replaced."""
        module.__spec__ = module.__spec__.loader_state if module.__spec__ else None
