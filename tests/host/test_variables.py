"""Environment variables: one table, through which all are read, checked and documented."""

from __future__ import annotations

import ast
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import clcomm
from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.base.host import variables
from clcomm.engine import Replay
from tests.helpers import one_line
from training.data import choose

ROOT = Path(__file__).resolve().parents[2]
READERS = ("text", "is_on", "seems_on", "seconds", "count", "file", "directory")
TABLE = variables.VARIABLES
#: For each type: values that it has, with what is read, and values that it has not.
RIGHT = {
    variables.SWITCH: [("1", True), ("on", True), (" Yes ", True), ("TRUE", True), ("0", False), ("off", False),
                       ("False", False), ("no", False)],
    variables.SECONDS: [("0", 0.0), ("2.5", 2.5), ("1e3", 1000.0), ("inf", float("inf"))],
    variables.COUNT: [("0", 0), ("12", 12)],
}  # fmt: skip
WRONG = {
    variables.SWITCH: ["maybe", "2", "-1", "onn"], variables.SECONDS: ["abc", "-1", "nan", "", "10 s"],
    variables.COUNT: ["-1", "1.5", "one"], variables.DIRECTORY: ["/nowhere/at/all", __file__],
    variables.WRITABLE: ["/nowhere/at/all", "/proc/1"], variables.READABLE: ["/nowhere/at/all", "/proc"],
}  # fmt: skip
READ = {variables.SWITCH: variables.is_on, variables.SECONDS: variables.seconds, variables.COUNT: variables.count,
        variables.DIRECTORY: variables.directory, variables.WRITABLE: variables.directory,
        variables.READABLE: variables.file}  # fmt: skip


@pytest.fixture(autouse=True)
def unset(monkeypatch) -> None:
    for name in TABLE:
        monkeypatch.delenv(name, raising=False)


def of_types(*types: str) -> list[str]:
    return [name for name, variable in TABLE.items() if variable.type in types]


@pytest.mark.parametrize("name", of_types(*RIGHT))
def test_values_of_the_type_are_read(name, monkeypatch) -> None:
    read = READ[TABLE[name].type]
    for value, expected in RIGHT[TABLE[name].type]:
        monkeypatch.setenv(name, value)
        assert read(name) == expected and variables.problem(name) == ""
    monkeypatch.delenv(name)
    assert read(name) == {"on": True, "off": False, "0": 0}.get(TABLE[name].default)


@pytest.mark.parametrize("name", of_types(*WRONG))
def test_other_values_are_refused_in_one_line(name, monkeypatch) -> None:
    for value in WRONG[TABLE[name].type]:
        monkeypatch.setenv(name, value)
        uses = [lambda: READ[TABLE[name].type](name)]
        uses += [lambda: Communicator(transport="solo")] if TABLE[name].of_every_job else []
        for use in uses:
            with pytest.raises(ArgumentError) as caught:
                use()
            line = one_line(caught)
            assert line.startswith(f"{name}: expected ") and line.endswith(f", got {value!r}")


def test_what_reads_a_variable_refuses_its_wrong_values(monkeypatch, tmp_path) -> None:
    """One place for each variable that a Communicator does not check."""
    monkeypatch.setenv("CLCOMM_REPLAY", "maybe")
    with pytest.raises(ArgumentError, match="CLCOMM_REPLAY: expected on or off, 1 or 0, got 'maybe'"):
        Replay(lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLCOMM_OFFLINE", "perhaps")
    with pytest.raises(ArgumentError, match="CLCOMM_OFFLINE: expected on or off"):
        choose.choose("mnist")
    monkeypatch.setenv("CLCOMM_DATA", str(tmp_path / "none"))
    for data in ("mnist", "auto", "cifar10"):
        with pytest.raises(ArgumentError, match="CLCOMM_DATA: expected a directory that is there"):
            choose.choose(data)


def test_a_misspelt_name_gets_one_warning(monkeypatch, caplog) -> None:
    """Every variable and argument, with a letter left out, doubled or exchanged with the next one."""
    meant: dict[str, str] = {}
    for own in [*TABLE, *(variables.START + name.upper() for name in variables.ARGUMENTS)]:
        where = variables.ARGUMENTS.get(own.removeprefix(variables.START).lower())
        for at in range(len(variables.START), len(own) - 1):
            for name in (own[:at] + own[at + 1 :], own[:at] + own[at] + own[at:],
                         own[:at] + own[at + 1] + own[at] + own[at + 2 :]):  # fmt: skip
                if name not in TABLE:
                    meant[name] = own if where is None else f"{where}({own.removeprefix(variables.START).lower()}=...)"
    for name, right in meant.items():
        monkeypatch.setenv(name, "1")
        found = variables.unknown()[name]
        assert found == right or {found, right} <= {"CLCOMM_TRACE", "CLCOMM_TRACEBACK"}, name
        monkeypatch.delenv(name)
    monkeypatch.setenv("CLCOMM_TIMOUT_S", "5")
    monkeypatch.setenv("CLCOMM_QUITE_ANOTHER", "5")
    variables._warn_of.cache_clear()
    with caplog.at_level(logging.WARNING, "clcomm"):
        for _ in range(2):
            Communicator(transport="solo").finalize()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("CLCOMM_TIMOUT_S: ") and said.endswith("did you mean CLCOMM_TIMEOUT_S?")


def test_the_arguments_are_those_of_the_classes() -> None:
    for name, where in variables.ARGUMENTS.items():
        assert name in inspect.signature(getattr(clcomm, where)).parameters


# --- the sources, and the page ---


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in ("clcomm", "training", "models"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def named(tree: ast.AST) -> set[str]:
    """Return the variables whose names are texts in a source."""
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return texts & set(TABLE)


def reads(tree: ast.AST, of: str, functions: tuple[str, ...]) -> list[ast.expr]:
    """Return the first arguments of a module's functions of these names."""
    return [
        node.args[0] for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in functions
        and ast.unparse(node.func.value) == of and node.args
    ]  # fmt: skip


def test_no_source_reads_one_past_the_table() -> None:
    past = []
    for path, tree in sources():
        asked = [*reads(tree, "os.environ", ("get", "pop")), *reads(tree, "os", ("getenv",))]
        asked += [node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript)
                  and isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == "os.environ"]  # fmt: skip
        constants = {target.id: node.value for node in ast.walk(tree) if isinstance(node, ast.Assign)
                     for target in node.targets if isinstance(target, ast.Name)}  # fmt: skip
        for name in asked:
            value = constants.get(name.id, name) if isinstance(name, ast.Name) else name
            if "CLCOMM_" in ast.unparse(value):
                past.append(f"{path}: {ast.unparse(name)}")
    assert past == []


def test_each_variable_is_read_somewhere() -> None:
    read = {
        name
        for path, tree in sources()
        if path != "clcomm/base/host/variables.py" and reads(tree, "variables", READERS)
        for name in named(tree)
    }
    assert sorted(read) == sorted(TABLE)


def test_the_page_has_each_type_and_default() -> None:
    page = (ROOT / "docs" / "reference" / "variables.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    assert [(name.strip("`"), kind, default) for name, kind, _, default in rows] == [
        (name, variable.type, variable.default) for name, variable in sorted(TABLE.items())
    ]
