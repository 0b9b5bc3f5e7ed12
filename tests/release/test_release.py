"""What `make release` checks by itself: sections of a changelog, and that archives hold what they have to."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.release import build_and_check, newcomer


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


PAGE = """
Type `make this` or `mpiexec -n 2 that`, not `make test`.

```sh
echo one   # a comment
```

```text
one
```

```python
# two.py
print(2)
```

```python
print("not saved")
```

```sh
python3 two.py
```

```text
{two}
```
"""


@pytest.mark.parametrize(
    ("commands", "two", "wrong"),
    [
        ("", "2", []), ("", "3", ["python3 two.py: no line '3'"]),
        ("false", "2", ["make this: exit code 1\n", "mpiexec -n 2 that: did not run", "echo one: did not run"]),
    ],
)  # fmt: skip
def test_a_newcomer_types_what_a_page_says(commands: str, two: str, wrong: list[str], tmp_path: Path) -> None:
    typed = newcomer.commands(PAGE.format(two=two))
    assert [each.line for each in typed[:3]] == ["make this", "mpiexec -n 2 that", "echo one"]
    assert typed[2].shown == ("one",) and len(typed) == 5
    told = f"make() {{ {commands or 'true'}; }}; mpiexec() {{ true; }}\n" + newcomer.script(typed, "")
    done = subprocess.run(["bash", "-c", told], cwd=tmp_path, capture_output=True, text=True)
    assert newcomer.differences(typed, done.stdout, done.returncode)[: len(wrong) or 1] == wrong
    assert (tmp_path / "two.py").is_file() == (not commands)
