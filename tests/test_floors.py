"""A file imports only from its own floor and those below; see tests/floors.py for which file is where."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.floors import PACKAGES, breaches, floor_of, imports_of

ROOT = Path(__file__).resolve().parents[1]


def repository() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def test_no_import_breaches_the_floors():
    sources = repository()
    assert {"clcomm/communicator.py", "clcomm/engine/__init__.py", "models/convnet.py"} <= set(sources)
    assert breaches(sources) == []


def test_the_engine_is_reached_from_above_alone():
    """The walk sees imports at all: these are known to be there."""
    sources = repository()
    files = {i.file for i in imports_of("clcomm/shared_space.py", sources["clcomm/shared_space.py"], sources)}
    assert {"clcomm/communicator.py", "clcomm/layout.py", "clcomm/adapters/__init__.py"} <= files
    assert any(i.file == "clcomm/engine/__init__.py" for path in sources if path.startswith("models/")
               for i in imports_of(path, sources[path], sources))  # fmt: skip


# --- the checker can fail ---

SOUND = {
    "clcomm/errors.py": "import re",
    "clcomm/layout.py": "from clcomm.errors import ArgumentError",
    "clcomm/transport/__init__.py": "from clcomm.transport.mpi import Mpi",
    "clcomm/transport/mpi.py": "def f():\n    from mpi4py import MPI",
    "clcomm/stats.py": "",
    "clcomm/communicator.py": "from clcomm import job, stats\nfrom clcomm.transport import Mpi",
    "clcomm/job.py": "",
    "clcomm/engine/__init__.py": "from clcomm.engine.tensor import Tensor",
    "clcomm/engine/tensor.py": "from .. import layout",
    "clcomm/optim.py": "import clcomm.engine",
    "clcomm/adapters/__init__.py": "def f():\n    from clcomm.adapters.torch import TorchReplica",
    "clcomm/adapters/torch.py": "import torch\nfrom clcomm.adapters import replica_of",
    "models/mlp.py": "from clcomm.engine import Linear",
    "training/trainer.py": "from models.mlp import MLP\nfrom clcomm import optim",
    "examples/mnist.py": "from training import trainer",
    "training/__init__.py": "",
}


def test_sound_sources_pass():
    assert breaches(SOUND) == []


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        (
            "clcomm/layout.py",
            "import os\nfrom clcomm.communicator import Communicator",
            "clcomm/layout.py:2: is on floor 0 and imports clcomm/communicator.py of floor 1",
        ),
        (
            "clcomm/job.py",
            "def f():\n    from clcomm import optim",
            "clcomm/job.py:2: is on floor 1 and imports clcomm/optim.py of floor 2",
        ),
        (
            "clcomm/errors.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from clcomm.stats import CommStats",
            "clcomm/errors.py:3: is on floor 0 and imports clcomm/stats.py of floor 1",
        ),
        (
            "clcomm/stats.py",
            "import clcomm.engine.tensor",
            "clcomm/stats.py:1: imports clcomm/engine/tensor.py: the engine and the Communicator's side know nothing "
            "of each other",
        ),
        (
            "clcomm/engine/tensor.py",
            "from ..communicator import Communicator",
            "clcomm/engine/tensor.py:1: imports clcomm/communicator.py: the engine and the Communicator's side know "
            "nothing of each other",
        ),
        (
            "clcomm/communicator.py",
            "from mpi4py import MPI",
            "clcomm/communicator.py:1: imports mpi4py; of clcomm only transport/mpi.py does",
        ),
        (
            "training/trainer.py",
            "try:\n    import mpi4py.MPI\nexcept ImportError:\n    pass",
            "training/trainer.py:2: imports mpi4py; of clcomm only transport/mpi.py does",
        ),
        (
            "models/mlp.py",
            "from clcomm.engine import Linear\nfrom clcomm.layout import FlatLayout",
            "models/mlp.py:2: imports clcomm/layout.py: models know the engine alone",
        ),
        (
            "models/mlp.py",
            "import training.trainer",
            "models/mlp.py:1: imports training/trainer.py: models know the engine alone",
        ),
        (
            "training/trainer.py",
            "import examples.mnist",
            "training/trainer.py:1: is on floor 3 and imports examples/mnist.py of floor 4",
        ),
        (
            "examples/mnist.py",
            "from training.gone import Loop",
            "examples/mnist.py:1: imports training.gone, which is no file here",
        ),
        ("clcomm/mesh.py", "", "clcomm/mesh.py: is on no floor; place it in tests/floors.py"),
        (
            "clcomm/job.py",
            "def f():\n    import clcomm.communicator",
            "import cycle: clcomm/communicator.py -> clcomm/job.py -> clcomm/communicator.py",
        ),
    ],
)
def test_a_made_up_breach_is_found(path, source, expected):
    assert expected in breaches({**SOUND, path: source})


def test_floors_by_folder_and_by_name():
    assert floor_of("clcomm/transport/anything.py") == 0
    assert floor_of("clcomm/engine/ops/matmul.py") == 1
    assert floor_of("clcomm/unheard_of.py") is None
