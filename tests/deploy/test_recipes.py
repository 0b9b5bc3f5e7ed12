"""The recipe for conda-forge and the workflow: they say what pyproject.toml and the Makefile say."""

from __future__ import annotations

import re

import pytest

from tests.faults.launch import ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; pip install -e '.[test]'")
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def test_the_recipe_asks_for_what_the_wheel_asks_for() -> None:
    recipe = yaml.safe_load((ROOT / "deploy" / "conda-recipe.yaml").read_text())
    dependencies = re.search(r"^dependencies = \[\n(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)
    assert dependencies is not None
    asked = {each.replace(">=", " >=") for each in re.findall(r'"(.+?)"', dependencies[1])}
    assert set(recipe["requirements"]["run"]) == {*asked, "__linux", "python >=${{ python_min }}"}
    version = re.search(r'__version__ = "(.+)"', (ROOT / "clcomm" / "_version.py").read_text())
    assert version is not None and recipe["context"]["version"] == version[1]
    assert f'requires-python = ">={recipe["context"]["python_min"]}"' in PYPROJECT
    assert recipe["build"]["python"]["entry_points"] == ["clcomm = clcomm.tools.cli:entry"]
    assert 'clcomm = "clcomm.tools.cli:entry"' in PYPROJECT


def test_the_workflow_s_commands_name_what_there_is() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert set(workflow["jobs"]) == {"test", "pure", "wsl"}
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["timeout-minutes"] <= 90
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            command = step.get("run", "")
            assert all((ROOT / name).is_file() for name in re.findall(r"tests/\S+|\.ci/\w+", command))
            extras = re.findall(r"'\.\[([\w,-]+)\]'", command)
            assert all(f"\n{extra} = [" in PYPROJECT for each in extras for extra in each.split(","))


def test_the_pure_tests_are_there() -> None:
    for line in (ROOT / "tests" / "pure.txt").read_text().splitlines():
        path, _, name = line.removeprefix("--deselect=").partition("::")
        assert (ROOT / path).exists() and (not name or f"def {name}(" in (ROOT / path).read_text()), line
