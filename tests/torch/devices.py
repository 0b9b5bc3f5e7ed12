"""A device of PyTorch beside the CPU, which $OTHER_DEVICE names: pytorch_ocl's, or that of private_device.cpp."""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import types
from functools import cache
from pathlib import Path

import torch

from clcomm.comm.communicator import Communicator
from tests.caches import CACHES

SOURCE = Path(__file__).with_name("private_device.cpp")
IS_OPENCL = os.environ.get("OTHER_DEVICE") == "ocl"


@cache
def other_device() -> torch.device:
    """Return the device; collective: one rank builds it. A process has one, as PyTorch's key is one."""
    if IS_OPENCL:
        importlib.import_module("pytorch_ocl")
        return torch.device("ocl:0")
    comm = Communicator()
    torch.ops.load_library(comm.broadcast_object(_built() if comm.rank == 0 else None, 0))
    comm.finalize()
    torch.utils.rename_privateuse1_backend("private")
    seeding = {"_is_in_bad_fork": lambda: False, "manual_seed_all": lambda seed: None}  # which PyTorch asks for
    torch._register_device_module("private", types.SimpleNamespace(**seeding))
    return torch.device("private:0")


def _built() -> str:
    """Return the library's path; it is built once for a version of PyTorch, in some ten seconds."""
    source = SOURCE.read_bytes()
    path = CACHES / f"private_device-{torch.__version__}-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        package = Path(torch.__file__).parent
        includes = [f"-I{package / 'include' / each}" for each in ("", "torch/csrc/api/include")]
        fresh = f"{path}.{os.getpid()}"
        subprocess.run(
            ["g++", "-std=c++17", "-shared", "-fPIC", "-w", *includes, SOURCE, f"-L{package / 'lib'}", "-ltorch_cpu",
             "-lc10", "-o", fresh], check=True,
        )  # fmt: skip
        os.replace(fresh, path)
    return str(path)
