"""Options that contradict each other: refused on the command line, by their names."""

from __future__ import annotations

import re

import pytest

from clcomm.errors import ArgumentError
from tests.helpers import one_line
from training import options as command_line


@pytest.mark.parametrize("scheme", ["fp16", "int8", "topk:0.1", "powersgd:2"])
def test_split_tensors_are_not_compressed(scheme: str) -> None:
    parse = command_line.parser("x", "").parse_args
    with pytest.raises(ArgumentError) as caught:
        command_line.check(parse(["--compression", scheme, "--split-tensors"]))
    assert one_line(caught) == "--split-tensors: expected no --compression with it, which wants whole tensors"
    command_line.check(parse(["--compression", scheme]))
    command_line.check(parse(["--split-tensors"]))


def test_the_help_names_learning_rates_in_words() -> None:
    shown = " ".join(command_line.parser("examples.mnist", "").format_help().split())
    said = shown.partition("--lr RATE default: ")[2].partition(" --")[0]
    rates = {float(rate): names for rate, names in re.findall(r"([\d.e-]+) for (\w+(?: and \w+)*)", said)}
    assert {name: rate for rate, names in rates.items() for name in names.split(" and ")} == command_line.DEFAULT_LR
    assert "{" not in re.sub(r"\{[\w,.-]+\}", "", shown)  # no dict, only choices
