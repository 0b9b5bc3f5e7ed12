"""What `make release` checks by itself: sections of a changelog, and that archives hold what they have to."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.release import build_and_check
from tests.release.newcomer import EPOCH


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("# Changelog\n\n## 1.2.0, 2026-01-31\n\n## 1.1.0, 2025-01-01\n", "dated"),
        ("## 1.2.0, unreleased\n", "unreleased"), ("## 1.2.0, 31.1.2026\n", "31.1.2026"),
        ("## 1.1.0, 2025-01-01\n\n## 1.2.0, 2026-01-31\n", "missing"), ("", "missing"),
    ],
)  # fmt: skip
def test_a_changelogs_first_section_names_the_version(text: str, state: str) -> None:
    assert build_and_check.section(text, "1.2.0") == state


def test_this_version_has_its_section() -> None:
    changelog = (build_and_check.ROOT / "CHANGELOG.md").read_text()
    assert build_and_check.section(changelog, build_and_check.version()) != "missing"


@pytest.mark.parametrize("change", ["none", "lacks", "holds"])
def test_a_wheel_that_lacks_or_adds_a_file_is_refused(change: str, tmp_path: Path) -> None:
    names = sorted(build_and_check.package_files())
    assert "clcomm/py.typed" in names and len(names) > 100
    names = names[1:] if change == "lacks" else [*names, "tests/x.py"] if change == "holds" else names
    with zipfile.ZipFile(tmp_path / "clcomm-1.whl", "w") as archive:
        for name in [*names, "clcomm-1.dist-info/METADATA"]:
            archive.writestr(name, "")
    if change == "none":
        build_and_check.require_package(tmp_path / "clcomm-1.whl")
        return
    with pytest.raises(SystemExit, match=f"clcomm-1.whl {change} "):
        build_and_check.require_package(tmp_path / "clcomm-1.whl")


def test_an_epochs_line_is_recognised() -> None:
    assert EPOCH.search("epoch 1: mean training loss 0.2440; test accuracy 98.28%")
