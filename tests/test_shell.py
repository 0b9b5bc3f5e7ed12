"""What makes the command at home in a shell: completion, the manual page, examples in each help, exit codes."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clcomm.base import errors
from clcomm.base.errors import ArgumentError, ClcommError
from clcomm.base.host.rank_process import ENDED_BY
from clcomm.comm.watch import endings
from clcomm.jobs.launch import supervisor
from clcomm.jobs.top import view
from clcomm.tools import cli
from clcomm.tools.commands import compare, completion, doctor
from clcomm.tools.commands.listing import whole_parser
from tests.helpers import installs, one_line
from training import end_of_run

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = [each.load() for each in cli.COMMANDS if isinstance(each, cli.Listed)]


def options_of(name: str) -> list[str]:
    parser = whole_parser()
    commands = next(action for action in parser._actions if hasattr(action, "choices") and action.choices)
    shown = [
        action
        for action in commands.choices[name]._actions
        if action.help != argparse.SUPPRESS and action.dest != "help"
    ]
    return [option for action in shown for option in action.option_strings if option.startswith("--")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_help_teaches_with_examples_that_parse(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command.name, "--help"])
    shown = capsys.readouterr().out
    assert command.examples
    for example, what in command.examples:
        assert f"  {example}\n      {what}\n" in shown
        line = re.sub(r'^eval "\$\((.*)\)"$', r"\1", example).partition(" > ")[0].partition(" | ")[0]
        words = shlex.split(line)
        words = words[words.index("clcomm") + 1 :]
        assert words[0] == command.name
        cli.make_parser(words).parse_args(words)


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_completion_knows_every_command_and_option(shell, capsys):
    pytest.importorskip("shtab")
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in COMMANDS:
        assert command.name in script
        assert [option for option in options_of(command.name) if option.lstrip("-") not in script] == []


#: Asks an interactive zsh, in a terminal of its own, with the script in a folder of functions.
_IN_ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PS1=; fpath+=$1; autoload -U compinit; compinit -u -D; print rea''dy"
zpty -r shell shown '*ready*'
zpty -w -n shell "$2"$'\\t'
shown=
repeat 200; do
    zpty -r -t shell more && shown+=$more
    [[ $shown == *"$3"* ]] && break
    sleep 0.05
done
zpty -d shell
print -r -- $shown
"""


@pytest.mark.parametrize("shell", completion.SHELLS)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("clcomm doct", "doctor"),
        ("clcomm doctor --js", "--json"),
        ("clcomm completion z", "zsh"),
        ("clcomm report --format mark", "markdown"),
        ("clcomm top --onc", "--once"),
    ],
)
def test_a_shell_completes(shell, words, expected, capsys, tmp_path):
    pytest.importorskip("shtab")
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    cli.main(["completion", shell])
    file = tmp_path / "_clcomm"
    file.write_text(capsys.readouterr().out)
    if shell == "bash":
        ask = f"source {file}; COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; COMP_LINE='{words}'; "
        ask += "$(complete -p clcomm | sed 's/.*-F \\([^ ]*\\) .*/\\1/') clcomm; printf '%s\\n' \"${COMPREPLY[@]}\""
        command = [shell, "-c", ask]
    elif shell == "zsh":
        command = [shell, "-fc", _IN_ZSH, shell, str(tmp_path), words, expected]
    else:
        command = [shell, "--no-config", "-c", f"source {file}; complete -C '{words}' | cut -f 1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    if shell == "zsh":  # the whole line, among the terminal's codes
        assert f"{words.rpartition(' ')[0]} {expected}" in done.stdout
    else:
        assert [word.strip() for word in done.stdout.split()] == [expected]


def test_completion_without_shtab_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(ArgumentError) as caught:
        cli.main(["completion", "bash"])
    assert one_line(caught) == f"shtab is not installed; do: {installs('completion')}"


# --- exit codes ---


def test_every_exit_code_of_the_code_is_on_the_page():
    used = {
        endings.USER_ERROR, endings.FAILURE, endings.INTERRUPTED, endings.TERMINATED, endings.TIMED_OUT,
        supervisor.NOT_FOUND, compare.SLOWER, end_of_run.TARGET_MISSED, doctor.FOUND, view.NoJobError.exit_code,
        *(128 + number for number in ENDED_BY),
    }  # fmt: skip
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    assert used | {0} == {int(code) for code in re.findall(r"^\| (\d+) \| .+? \|", page, re.MULTILINE)}


def test_errors_of_a_restart_that_may_help_are_on_the_page():
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, ClcommError)]
    assert {kind.exit_code for kind in kinds} == {1, 2}
    section = page.split("## Errors that a restart may cure")[1].split("\n## ")[0]
    assert set(re.findall(r"`(\w+Error)`", section)) == {kind.__name__ for kind in kinds if kind.exit_code == 1}
