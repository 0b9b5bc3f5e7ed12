"""A package imports only from floors below its own, and no files import each other; see tests/floors.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.floors import FLOORS, MOST_LOOSE, PACKAGES, breaches, imports_of, is_loose, package_of

ROOT = Path(__file__).resolve().parents[1]


def repository() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def test_no_import_breaches_the_floors():
    sources = repository()
    assert {"clcomm/comm/communicator.py", "clcomm/engine/__init__.py", "models/convnet.py"} <= set(sources)
    assert breaches(sources) == []


def test_every_package_of_the_floors_exists():
    assert [name for floor in FLOORS for name in floor if not (ROOT / name).is_dir()] == []


def test_the_documented_table_has_every_package_on_its_floor():
    page = (ROOT / "docs" / "reference" / "packages.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `([\w/]+)` \| \S.* \|$", page, re.MULTILINE)
    assert rows == [(str(floor), name) for floor, names in enumerate(FLOORS) for name in names]


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
    "clcomm/engine/tensor.py": "from ..flat_space import layout",
    "clcomm/base/flat_space/__init__.py": "",
    "clcomm/optim.py": "import clcomm.engine\nimport clcomm.sync.adapters",
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
            "clcomm/comm/transport/solo.py",
            "import os\nfrom clcomm.comm.communicator import Communicator",
            "clcomm/comm/transport/solo.py:2: is on floor 2 and imports clcomm/comm/communicator.py of floor 4",
        ),
        (
            "clcomm/comm/watch/exits.py",
            "def f():\n    from clcomm import optim",
            "clcomm/comm/watch/exits.py:2: is on floor 4 and imports clcomm/optim.py of floor 7",
        ),
        (
            "clcomm/comm/transport/mpi_runtime.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from clcomm.comm.stats.events import Phase",
            "clcomm/comm/transport/mpi_runtime.py:3: is on floor 2 and imports clcomm/comm/stats/events.py of floor 3",
        ),
        (
            "clcomm/base/flat_space/layout.py",
            "from clcomm.base.storage.cache import folder",
            "clcomm/base/flat_space/layout.py:1: is on floor 1 and imports clcomm/base/storage/cache.py of floor 1",
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
            "from ..communicator import Communicator",
            "clcomm/engine/tensor.py:1: is on floor 2 and imports clcomm/comm/communicator.py of floor 4",
        ),
        (
            "clcomm/comm/communicator.py",
            "from mpi4py import MPI",
            "clcomm/comm/communicator.py:1: imports mpi4py; of clcomm only transport/mpi_*.py does",
        ),
        (
            "training/trainer.py",
            "try:\n    import mpi4py.MPI\nexcept ImportError:\n    pass",
            "training/trainer.py:2: imports mpi4py; of clcomm only transport/mpi_*.py does",
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
            "training/data/idx.py:1: is on floor 12 and imports examples/mnist.py of floor 14",
        ),
        (
            "examples/mnist.py",
            "from training.gone import Loop",
            "examples/mnist.py:1: imports training.gone, which is no file here",
        ),
        ("clcomm/mesh/grid.py", "", "clcomm/mesh/grid.py: is in no package of FLOORS; add it to tests/floors.py"),
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
    more = {"clcomm/comm/stats/table.py": "import clcomm.comm.stats.events", "clcomm/base/storage/cache.py": ""}
    assert expected in breaches({**SOUND, **more, path: source})


def test_too_many_loose_modules_are_a_breach():
    many = {f"clcomm/loose_{number}.py": "" for number in range(MOST_LOOSE)}
    count = sum(path.count("/") == 1 for path in {**SOUND, **many} if path.startswith("clcomm/"))
    assert breaches({**SOUND, **many}) == [f"clcomm/: holds {count} modules, {MOST_LOOSE} at most"]


def test_packages_and_loose_modules():
    assert package_of("clcomm/comm/transport/anything.py") == "clcomm/comm/transport"
    assert package_of("clcomm/comm/communicator.py") is None and is_loose("clcomm/comm/communicator.py")
    assert package_of("clcomm/unheard_of/it.py") is None and not is_loose("clcomm/unheard_of/it.py")
