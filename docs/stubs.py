"""`python -m docs.stubs` writes the types of the functions that clcomm/engine/registry.py lists, as stubs."""

from __future__ import annotations

import inspect
from pathlib import Path

from clcomm.engine import functional, registry

FOLDER = Path(registry.__file__).parent
_HEAD = """# Written by `python -m docs.stubs`.
from collections.abc import Callable
from typing import Any, Generic

"""


def functions() -> str:
    """Return functional.pyi: each function is that of its file, with its signature."""
    listed = [*registry.entries()]
    lines = [f"from clcomm.engine.ops.{each.file} import {each.own_name} as {each.name}" for each in listed]
    lines += ["from clcomm.engine.tensor import Tensor", "", f"__all__ = {functional.__all__!r}", ""]
    lines += [f"{each.name}_: Callable[..., Tensor]" for each in listed if each.has_in_place]
    return _HEAD + "\n".join(lines) + "\n"


def methods() -> str:
    """Return tensor_functions.pyi: the methods of Tensor, and what they return."""
    lines = ["from clcomm.engine.tensor_shapes import AnyTensor", "", "class FunctionMethods(Generic[AnyTensor]):"]
    for each in registry.entries():
        if each.is_method:
            given = inspect.signature(inspect.unwrap(getattr(functional, each.name))).return_annotation
            result = "AnyTensor" if given == "Tensor" else "Any"
            names = [each.name, f"{each.name}_"] if each.has_in_place else [each.name]
            lines += [f"    {name}: Callable[..., {result}]" for name in names]
    for name, method in registry.operators(vars(functional)).items():
        given = "index: object" if name == "__getitem__" else "other: AnyTensor | float"
        is_of_two = len(inspect.signature(method).parameters) > 1
        lines.append(f"    def {name}(self{f', {given}' if is_of_two else ''}) -> AnyTensor: ...")
    return _HEAD + "\n".join(lines) + "\n"


def stubs() -> dict[Path, str]:
    """Return the stubs' texts."""
    return {FOLDER / "functional.pyi": functions(), FOLDER / "tensor_functions.pyi": methods()}


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text)
