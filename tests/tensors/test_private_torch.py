"""PyTorch's private names: listed in one file, and looked up when a module is imported."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.faults.launch import ROOT, clean_environment
from tests.helpers import installs

torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install -e '.[torch]'")

from clcomm.comm.tensors import private_torch  # noqa: E402

LISTED = {path.rpartition(".")[2] for path, _ in private_torch.NAMES.values()}


@pytest.mark.parametrize("name", private_torch.NAMES)
def test_this_release_has_every_name(name):
    assert private_torch.is_there(name) and getattr(private_torch, name) is not None


def test_no_other_file_names_one():
    found = []
    for path in (ROOT / "clcomm").rglob("*.py"):
        if path.name == "private_torch.py" or "torch" not in path.read_text():
            continue
        attributes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute))
        found += [f"{path.relative_to(ROOT)}:{node.lineno} {node.attr}" for node in attributes if is_private(node)]
    assert not found


def is_private(node):
    """Return whether an attribute is one of torch._C, or a private one that is listed."""
    of_torch = node.attr == "_C" and isinstance(node.value, ast.Name) and node.value.id == "torch"
    return of_torch or (node.attr.startswith("_") and node.attr in LISTED)


@pytest.mark.parametrize("module", ["clcomm.torch", "clcomm.comm.tensors.sharing"])
def test_a_release_without_one_is_named(module):
    code = f"import torch; torch.__version__ = '9.8.7'; del torch._C._storage_Use_Count; import {module}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
                           env=clean_environment(), cwd=ROOT)  # fmt: skip
    assert ended.stderr.splitlines()[-1] == (
        "clcomm: PyTorch 9.8.7: expected torch._C._storage_Use_Count, to count what uses a "
        f"tensor's memory, but this version has none; {installs('torch')} brings one that was tested"
    )
