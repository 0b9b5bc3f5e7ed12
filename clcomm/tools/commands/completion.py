"""`clcomm completion SHELL`: a completion script, made by shtab from the parsers."""

from __future__ import annotations

import argparse
import sys

from clcomm.base.errors import ArgumentError, needed
from clcomm.tools.commands.command import Command

SHELLS = ("bash", "zsh", "fish")
#: Metavars of options that are completed by files, and by directories.
_FILES, _DIRECTORIES = ("FILE", "OUT", "BEFORE", "AFTER"), ("DIR",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def run(options: argparse.Namespace) -> None:
    """Print the script; raises ArgumentError where shtab is missing, or too old for the shell."""
    with needed("shtab"):
        import shtab
    from clcomm.tools.commands.listing import whole_parser

    if options.shell not in shtab.SUPPORTED_SHELLS:
        raise ArgumentError(
            f"completion: expected a shtab that knows {options.shell}, got {shtab.__version__}; "
            "pip install -U 'clcomm[completion]'"
        )
    parser = whole_parser()
    _mark_paths(parser, shtab)
    sys.stdout.write(shtab.complete(parser, options.shell) + "\n")


def _mark_paths(parser: argparse.ArgumentParser, shtab: object) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _mark_paths(each, shtab)
        for names, kind in ((_FILES, "FILE"), (_DIRECTORIES, "DIRECTORY")):
            if action.metavar in names:
                action.complete = getattr(shtab, kind)  # type: ignore[attr-defined]


COMMAND = Command(
    "completion",
    "print the completion of this command's words for a shell",
    "Print a script that lets a shell complete clcomm's commands, options and files. It needs "
    "shtab, the extra `completion`.",
    add_arguments,
    run,
    (
        ('eval "$(clcomm completion bash)"', "in ~/.bashrc; complete in every new shell"),
        ("clcomm completion zsh > ~/.zfunc/_clcomm", "with fpath+=~/.zfunc before compinit in ~/.zshrc"),
        ("clcomm completion fish | source", "in ~/.config/fish/config.fish"),
    ),
)
