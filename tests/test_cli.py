"""The `clcomm` command: its sub-commands, its errors, and that each of them is documented by --help."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clcomm import __version__
from clcomm.base.errors import ArgumentError, DeviceError
from clcomm.tools import cli
from clcomm.tools.commands.command import Command
from clcomm.tools.commands.listing import MOVED
from tests.helpers import one_line

ROOT = Path(__file__).resolve().parent.parent


def clcomm(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clcomm", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=ROOT, env={**os.environ, **environment}
    )


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"clcomm {__version__}\n"


def test_the_console_script_is_this_command():
    assert '[project.scripts]\nclcomm = "clcomm.tools.cli:entry"\n' in (ROOT / "pyproject.toml").read_text()
    assert callable(cli.entry)
    assert clcomm("--version").stdout == f"clcomm {__version__}\n"


def test_help_lists_every_command_and_every_command_has_help(capsys):
    names = [command.name for command in cli.COMMANDS]
    assert {"devices", "tune-kernels"} <= set(names) and len(set(names)) == len(names)
    for arguments in (["--help"], *([name, "--help"] for name in names)):
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
        assert left.value.code == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in (names if arguments == ["--help"] else [f"clcomm {arguments[0]}"]))


@pytest.mark.parametrize("arguments", [["fly"], ["devices", "--fast"]])
def test_a_command_line_that_means_nothing(arguments, capsys):
    with pytest.raises(ArgumentError) as caught:
        cli.main(arguments)
    assert re.search(r"; see clcomm( \w+)? --help$", one_line(caught))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words", [["fly", "--help"], ["plan"], ["plan", "--help"], ["replay", "x", "--step", "1"]])
def test_a_word_that_is_no_command_is_one_line(words: list[str]) -> None:
    """Also of a command that has moved, which names its new place."""
    done = clcomm(*words)
    (line,) = done.stderr.splitlines()
    expected = "argument command: invalid" if words[0] == "fly" else f"{words[0]}: works in clcomm's repository alone"
    assert (done.returncode, done.stdout) == (2, "") and line.startswith(f"clcomm: {expected}")
    if words[0] in MOVED:
        program = line.rpartition("; there, ")[2].split()
        shown = subprocess.run(
            [sys.executable, *program[1:], "--help"], capture_output=True, text=True, cwd=ROOT, check=True
        )
        assert shown.stdout.startswith(f"usage: {' '.join(program)} ")


def test_without_a_command_there_is_help() -> None:
    done = clcomm()
    assert (done.returncode, done.stdout, done.stderr) == (0, clcomm("--help").stdout, "")


#: What commands take besides options.
PLACES = {"run": ["x.py"], "verify": ["x.py"], "completion": ["bash"], "compare": ["x", "y"],
          "report": ["x"], "forecast": ["x"], "trace": ["x"]}  # fmt: skip


@pytest.mark.parametrize("name", [listed.name for listed in cli.COMMANDS])
def test_a_mistyped_word_is_answered_by_the_one_meant(name: str) -> None:
    """Each command and each option of it, with its last letter twice."""
    own = cli.make_parser([name])._subparsers._group_actions[0].choices[name]
    lines = {name: [name + name[-1]]}
    for option in own._option_string_actions:
        if option.startswith("--"):
            lines[option] = [name, option + option[-1], *PLACES.get(name, [])]
    for meant, words in lines.items():
        with pytest.raises(ArgumentError) as caught:
            cli.main(words)
        assert f" (did you mean {meant}?); see clcomm" in one_line(caught)


def test_what_is_like_no_word_has_no_question_and_a_list_to_choose_from() -> None:
    with pytest.raises(ArgumentError, match=r"invalid choice: 'fly' \(choose from .*report"):
        cli.main(["fly"])
    with pytest.raises(ArgumentError, match=r"^unrecognized arguments: --xyzzy; see clcomm devices --help"):
        cli.main(["devices", "--xyzzy"])


def test_a_new_command_needs_only_its_entry(monkeypatch):
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("code", type=int)

    command = Command("leave", "leave with a code", "Leave.", add_arguments, lambda options: options.code)
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, command))
    assert cli.main(["leave", "3"]) == 3
    assert cli.main(["leave", "0"]) == 0


def test_devices_lists_them_and_marks_one():
    done = clcomm("devices")
    assert done.returncode == 0, done.stderr
    heading, *rows, note = done.stdout.partition("a small ConvNet's gradients")[0].splitlines()
    assert heading.split() == ["device", "name", "platform", "driver", "units", "memory", "kernels"]
    assert len([row for row in rows if row.startswith("*")]) == 1
    assert all(re.search(r"(cpu|gpu|accelerator):\d .* \d+ +[\d.]+ [KMGT]iB +(built-in sizes|tuned)$", r) for r in rows)
    assert note.startswith("* what local rank 0 of 1 takes")
    assert "local rank 1 of 2" in clcomm("devices", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="2").stdout


def test_an_unknown_device_is_one_line():
    done = clcomm("devices", "--device", "gpu:77")
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("clcomm: device='gpu:77': expected one of ")
    with pytest.raises(DeviceError, match=r"^device='gpu:77': expected one of "):
        cli.main(["tune-kernels", "--device", "gpu:77"])


def test_an_unknown_device_of_the_environment(monkeypatch):
    monkeypatch.setenv("CLCOMM_DEVICE", "gpu:77")
    with pytest.raises(DeviceError, match=r"^CLCOMM_DEVICE='gpu:77': expected one of "):
        cli.main(["devices"])


def test_only_one_rank_of_a_host_tunes(monkeypatch, capsys):
    monkeypatch.setenv("MPI_LOCALRANKID", "1")
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    assert cli.main(["tune-kernels"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("listed", cli.COMMANDS, ids=lambda listed: listed.name)
def test_the_list_says_of_a_command_what_the_command_says_of_itself(listed):
    command = listed.load()
    assert (command.name, command.summary) == (listed.name, listed.summary)


HEAVY = ("numpy", "rich", "mpi4py", "pyopencl", "clcomm.comm.communicator")


@pytest.mark.parametrize(
    "words", [[], ["--version"], ["--help"], ["compare", "--help"], ["report", "--help"]], ids=" ".join
)  # fmt: skip
def test_help_and_version_import_nothing_that_takes_long(words):
    code = f"import sys; sys.argv[1:] = {words}\nimport atexit, clcomm.tools.cli\n"
    code += f"atexit.register(lambda: print('heavy:', [name for name in {HEAVY} if name in sys.modules]))\n"
    code += "clcomm.tools.cli.entry()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []" and len(done.stdout.splitlines()) > 1


def test_the_package_imports_its_names_when_they_are_asked_for():
    code = "import sys, clcomm\nbefore = [name for name in sys.modules if name.startswith(('clcomm.', 'numpy'))]\n"
    code += "import clcomm.base.units; assert clcomm.base.errors.ArgumentError\n"
    code += "assert set(clcomm.__all__) <= set(dir(clcomm))\n"
    code += "assert all(getattr(clcomm, name) for name in clcomm.__all__) and not hasattr(clcomm, 'nothing')\n"
    code += "from clcomm import *\nprint(before, Communicator.__name__, clcomm.Synchronizer is Synchronizer)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "['clcomm._moved', 'clcomm._version'] Communicator True\n"


def test_help_is_printed_by_one_rank(monkeypatch, capsys):
    for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        with monkeypatch.context() as rank_1:
            rank_1.setenv(name, "1")
            with pytest.raises(SystemExit):
                cli.main(["--version"])
    assert capsys.readouterr().out == ""
