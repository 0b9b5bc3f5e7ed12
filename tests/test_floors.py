"""A wing imports only from those before it, and no files import each other; see tests/floors.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.floors import LOOSE, PACKAGES, WINGS, breaches, imports_of, wing_of

ROOT = Path(__file__).resolve().parents[1]


def repository() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def test_no_import_breaches_the_order_of_the_wings():
    sources = repository()
    assert {"clcomm/comm/communicator.py", "clcomm/engine/__init__.py", "models/convnet.py"} <= set(sources)
    assert breaches(sources) == []


def test_a_newcomer_sees_the_wings_and_the_doors():
    """Nothing else lies in clcomm/ that a name of its own does not explain; each wing says in its first lines what
    it is for and where to start."""
    entries = {path.name for path in (ROOT / "clcomm").iterdir() if not path.name.startswith("__pycache__")}
    folders = {folder for wing in WINGS.values() for folder in wing if folder.startswith("clcomm/")}
    assert entries == {path.partition("/")[2] for path in (*folders, *LOOSE)} | {"py.typed"}
    assert len(entries) <= 24
    for folder in folders:
        assert (ROOT / folder / "__init__.py").read_text(encoding="utf-8").startswith(('"""', "#")), folder


def test_the_documented_table_has_every_wing_in_its_order():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")[1].strip() for line in page.partition("## Wings")[2].splitlines() if line.startswith("| **")
    ]
    assert rows == [f"**{wing}**" for wing in WINGS if wing not in ("models", "training", "examples")]


def test_the_engine_is_reached_from_above_alone():
    """The walk sees imports at all: these are known to be there."""
    sources = repository()
    space = "clcomm/sync/shared_space.py"
    files = {i.file for i in imports_of(space, sources[space], sources)}
    assert {
        "clcomm/comm/communicator.py",
        "clcomm/base/flat_space/layout.py",
        "clcomm/sync/adapters/__init__.py",
    } <= files
    assert any(i.file == "clcomm/engine/__init__.py" for path in sources if path.startswith("models/")
               for i in imports_of(path, sources[path], sources))  # fmt: skip


# --- the checker can fail ---

SOUND = {
    "clcomm/base/errors.py": "import re",
    "clcomm/base/flat_space/layout.py": "from clcomm.base.errors import ArgumentError",
    "clcomm/comm/transport/__init__.py": "from clcomm.comm.transport.mpi_runtime import Mpi",
    "clcomm/comm/transport/mpi_runtime.py": "def f():\n    from mpi4py import MPI",
    "clcomm/comm/stats/events.py": "",
    "clcomm/comm/communicator.py": "from clcomm.comm.stats import events\nfrom clcomm.comm.watch import exits",
    "clcomm/comm/stats/__init__.py": "",
    "clcomm/comm/watch/__init__.py": "",
    "clcomm/comm/watch/exits.py": "from clcomm.comm.transport import Mpi",
    "clcomm/engine/__init__.py": "from clcomm.engine.tensor import Tensor",
    "clcomm/engine/tensor.py": "from ..base.flat_space import layout",
    "clcomm/base/flat_space/__init__.py": "",
    "clcomm/optim/__init__.py": "import clcomm.engine\nimport clcomm.base.errors",
    "clcomm/sync/adapters/__init__.py": "def f():\n    from clcomm.sync.adapters.torch import TorchAdapter",
    "clcomm/sync/adapters/torch.py": "import torch\nfrom clcomm.engine import Tensor",
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
            "clcomm/comm/transport/hosts.py",
            "import os\nfrom clcomm.sync.adapters import torch",
            "clcomm/comm/transport/hosts.py:2: imports clcomm/sync/adapters/torch.py: comm comes before sync",
        ),
        (
            "clcomm/optim/__init__.py",
            "def f():\n    from clcomm.comm import communicator",
            "clcomm/optim/__init__.py:2: imports clcomm/comm/communicator.py: engine comes before comm",
        ),
        (
            "clcomm/base/flat_space/layout.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from clcomm.comm.stats.events import Phase",
            "clcomm/base/flat_space/layout.py:3: imports clcomm/comm/stats/events.py: base comes before comm",
        ),
        (
            "clcomm/comm/stats/events.py",
            "import clcomm.engine.tensor",
            "clcomm/comm/stats/events.py:1: imports clcomm/engine/tensor.py: communication knows nothing of the engine",
        ),
        (
            "clcomm/comm/communicator.py",
            "import clcomm.engine.tensor",
            "clcomm/comm/communicator.py:1: imports clcomm/engine/tensor.py: communication knows nothing of the engine",
        ),
        (
            "clcomm/engine/tensor.py",
            "from ..comm.communicator import Communicator",
            "clcomm/engine/tensor.py:1: imports clcomm/comm/communicator.py: engine comes before comm",
        ),
        (
            "clcomm/comm/communicator.py",
            "from mpi4py import MPI",
            "clcomm/comm/communicator.py:1: imports mpi4py; of clcomm only comm/transport/mpi_*.py does",
        ),
        (
            "training/trainer.py",
            "try:\n    import mpi4py.MPI\nexcept ImportError:\n    pass",
            "training/trainer.py:2: imports mpi4py; of clcomm only comm/transport/mpi_*.py does",
        ),
        (
            "models/mlp.py",
            "from clcomm.engine import Linear\nfrom clcomm.base.flat_space.layout import FlatLayout",
            "models/mlp.py:2: imports clcomm/base/flat_space/layout.py: models know the engine alone",
        ),
        (
            "models/mlp.py",
            "import training.trainer",
            "models/mlp.py:1: imports training/trainer.py: models know the engine alone",
        ),
        (
            "training/data/idx.py",
            "import examples.mnist",
            "training/data/idx.py:1: imports examples/mnist.py: training comes before examples",
        ),
        (
            "examples/mnist.py",
            "from training.gone import Loop",
            "examples/mnist.py:1: imports training.gone, which is no file here",
        ),
        ("clcomm/mesh/grid.py", "", "clcomm/mesh/grid.py: is in no wing; tests/floors.py lists them"),
        (
            "clcomm/comm/watch/exits.py",
            "def f():\n    import clcomm.comm.communicator",
            "import cycle: clcomm/comm/communicator.py -> clcomm/comm/watch/exits.py -> clcomm/comm/communicator.py",
        ),
        (
            "clcomm/comm/stats/events.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from clcomm.comm.stats.table import Table",
            "import cycle: clcomm/comm/stats/events.py -> clcomm/comm/stats/table.py -> clcomm/comm/stats/events.py",
        ),
    ],
)
def test_a_made_up_breach_is_found(path, source, expected):
    more = {"clcomm/comm/stats/table.py": "import clcomm.comm.stats.events", "clcomm/base/storage/private.py": ""}
    assert expected in breaches({**SOUND, **more, path: source})


def test_the_wing_of_a_file():
    assert wing_of("clcomm/comm/transport/anything.py") == "comm" and wing_of("clcomm/optim/adam.py") == "engine"
    assert wing_of("clcomm/communicator.py") is None and wing_of("clcomm/__init__.py") is None
