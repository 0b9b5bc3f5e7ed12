"""Errors' common words: how a message names ranks, and packages that are missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clcomm.base.errors import ArgumentError, name_ranks, require_version
from tests.faults.launch import ROOT, clean_environment
from tests.helpers import installs


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"), ([0, 2], "ranks 0 and 2"), ([0, 1, 3], "ranks 0, 1 and 3"), (range(2, 4), "ranks 2 and 3"),
        (range(8), "ranks 0, 1, 2, 3, 4, 5, 6 and 7"), (range(9), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more"),
    ],
)  # fmt: skip
def test_ranks_in_words(ranks, text):
    assert name_ranks(ranks) == text


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_every_rank_is_named_or_counted(most):
    for count in range(1, 25):
        ranks = [3 * rank + 1 for rank in range(count)]
        text = name_ranks(ranks, most)
        more = re.search(r" and (\d+) more$", text)
        named = [int(number) for number in re.findall(r"\d+", text[: more.start()] if more else text)]
        assert named == ranks[: len(named)] and len(named) + (int(more[1]) if more else 0) == count
        assert len(named) == (most if more else count) and bool(more) == (count > most)
        assert text.startswith("ranks " if count > 1 else "rank ")


#: What imports each package that an extra brings.
NEED = {
    "torch": (
        "import clcomm.torch", "import clcomm.sync.adapters.torch", "import clcomm.horovod",
        "import clcomm.lizardist.engine.model", "from training.engines.parts import _torch; _torch(*range(5))",
    ),
    "netcl": ("from clcomm.sync.adapters.netcl_runtime import prepare; prepare()",),
    "safetensors": ("from clcomm.engine.weights.safetensors import _library; _library()",),
    "shtab": ("from clcomm.tools.cli import main; main(['completion', 'bash'])",),
}  # fmt: skip
TRY_ALL = """
import sys
from pathlib import Path
class Absent:
    def find_spec(name, path, target=None):
        if {is_absent} and name.partition('.')[0] in {need!r}: raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent)
for statements in {need!r}.values():
    for statement in statements:
        try: exec(statement)
        except Exception as error: print(type(error).__name__, error)
"""


@pytest.mark.parametrize("body", [None, "raise ImportError('libc10.so: no such file')", "import no_such_dependency"])
def test_a_package_that_fails_to_import_is_not_said_to_be_missing(tmp_path, body):
    for package in NEED if body else ():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(body)
    ended = subprocess.run(
        [sys.executable, "-c", TRY_ALL.format(need=NEED, is_absent=body is None)], capture_output=True, text=True,
        timeout=120, check=False, env=clean_environment(PYTHONPATH=f"{tmp_path}:{ROOT}"), cwd=tmp_path,
    )  # fmt: skip
    said, count = ended.stdout.splitlines(), sum(map(len, NEED.values()))
    assert len(said) == count, ended.stderr
    if body is None:
        names = {"torch": "PyTorch", "shtab": "shtab"}
        extras = {"shtab": "completion"}
        expected = [
            f"ArgumentError {names.get(package, package)} is not installed; "
            f"do: {installs(extras.get(package, package))}"
            for package, statements in NEED.items()
            for _ in statements
        ]
        assert said == expected
    else:
        own = "ImportError libc10" if "libc10" in body else "ModuleNotFoundError No module named 'no_such_dependency'"
        assert all(line.startswith(own) for line in said), said


@pytest.mark.parametrize(
    ("package", "wanted", "others"), [("jax", "0.10", "0.9.2 0.11.0 1.10"), ("tinygrad", "0.14", "0.13.2")]
)
def test_another_version_of_a_package_is_refused(monkeypatch, package, wanted, others):
    for found in (wanted, f"{wanted}.3"):
        monkeypatch.setattr("importlib.metadata.version", lambda _, found=found: found)
        require_version(package, wanted)
    for found in others.split():
        monkeypatch.setattr("importlib.metadata.version", lambda _, found=found: found)
        with pytest.raises(ArgumentError) as caught:
            require_version(package, wanted)
        assert str(caught.value) == (
            f"{package}: expected version {wanted}, got {found}; do: {installs(package)} --upgrade"
        )


# --- how to install what is missing ---


@pytest.mark.parametrize(
    ("beside", "record", "expected"),
    [
        ("pyproject.toml", None, "pip install -e '{root}[torch]'"),
        (None, None, "pip install 'clcomm[torch]'"),
        (None, "{wheel}", "pip install '{wheel}[torch]'"),
        (None, "/gone/clcomm-0.1.0-py3-none-any.whl", "pip install 'clcomm[torch]'"),
    ],
    ids=["checkout", "index", "wheel", "wheel that is gone"],
)
def test_what_installs_an_extra_fits_how_clcomm_was_installed(tmp_path, beside, record, expected):
    root, wheel = tmp_path / "site packages", tmp_path / "clcomm-0.1.0-py3-none-any.whl"
    (root / "clcomm" / "base").mkdir(parents=True)
    wheel.touch()
    (root / "clcomm" / "__init__.py").touch()
    (root / "clcomm" / "base" / "errors.py").write_text((ROOT / "clcomm" / "base" / "errors.py").read_text())
    if beside:
        (root / beside).touch()
    about = root / "clcomm-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: clcomm\nVersion: 0.1.0\n")
    if record:
        path = record.format(wheel=wheel)
        (about / "direct_url.json").write_text(json.dumps({"url": Path(path).as_uri(), "archive_info": {}}))
    ended = subprocess.run(
        [sys.executable, "-S", "-c", "from clcomm.base.errors import pip_install; print(pip_install('torch'))"],
        capture_output=True, text=True, timeout=120, check=True, env=clean_environment(PYTHONPATH=str(root)), cwd=root,
    )  # fmt: skip
    assert ended.stdout.strip() == expected.format(root=root, wheel=wheel)
