"""Numbers on command lines: any text for any option of any command is one line, or a number within its bounds."""

from __future__ import annotations

import argparse
import os
import re
import sys
from fractions import Fraction

import pytest

from clcomm.base.console.option_types import MOST_COUNT, number, whole_number
from clcomm.base.errors import ArgumentError
from clcomm.base.host import host_bytes, require_memory
from clcomm.base.units import format_size
from clcomm.tools import cli
from examples import mnist
from tests.helpers import one_line
from tests.option_values import HOSTILE, Option, options
from training.options import MOST_SEED

#: Runs training with every number that the parser takes; else with the largest ones of some options.
FAMILY = bool(os.environ.get("CLCOMM_OPTION_FAMILY"))
SAMPLED = ("--grad-accumulation", "--bucket-size", "--checkpoint-keep", "--schedule")
#: Options that are divided by 100.
PERCENTAGES = ("--target-accuracy", "--fail-if-slower")
QUICK = ("--data=synthetic", "--model=mlp", "--no-eval", "--max-steps=1", "--epochs=1", "--quiet")
#: What options of text with numbers in it are given.
GRAMMARS = {
    "--schedule": ("step:size={}", "exponential:gamma={}", "cosine:warmup={}", "multistep:at={}", "linear:end={}"),
    "--compression": ("topk:{}", "powersgd:{}"),
    "--bucket-size": ("{}", "{}GiB"), "--first-bucket-size": ("{}", "{}GiB"), "--trace-limit": ("{}", "{}GiB"),
}  # fmt: skip


def is_number(option: Option) -> bool:
    action = option.action
    if action.nargs == 0 or action.choices or isinstance(action, argparse.BooleanOptionalAction):
        return False
    return action.type is not None or option.flag in GRAMMARS


def test_every_number_is_refused_in_a_line_or_within_bounds():
    tried, bare = 0, []
    for option in options():
        if option.action.type in (int, float):
            bare.append(f"{option.program} {option.flag}")  # no bounds, no plain digits
        if not is_number(option):
            continue
        for text in HOSTILE:
            tried += 1
            if text == "--" and option.action.nargs == "?":
                continue  # before Python 3.12 argparse takes it for the end of the options
            try:
                parsed = vars(option.parser.parse_args([f"{option.flag}={text}", *_positional(option)]))
            except ArgumentError as error:
                assert "\n" not in str(error) and option.flag in str(error), (option.flag, text)
                continue
            value = parsed[option.action.dest]
            assert isinstance(value, (int, float, str)), (option.flag, text)
            if isinstance(value, (int, float)):
                assert text.isascii() and 0 <= value <= 1e300, (option.flag, text)
                assert value == float(Fraction(text)) or option.flag in PERCENTAGES
                assert not isinstance(value, int) or value <= max(MOST_COUNT, MOST_SEED)
    assert bare == []
    assert tried > 20 * len(HOSTILE)


def _positional(option: Option) -> list[str]:
    return [
        "x" for action in option.parser._actions if not action.option_strings and action.nargs != argparse.REMAINDER
    ]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("least", [0, 1])
def test_whole_numbers_are_those_of_decimal_digits(text, least):
    """Against the grammar: an optional minus and ASCII digits."""
    expected = int(text) if re.fullmatch("-?[0-9]+", text, re.ASCII) and len(text) < 40 else None
    try:
        found = whole_number(least)(text)
    except argparse.ArgumentTypeError as error:
        assert expected is None or not least <= expected <= MOST_COUNT
        assert len(str(error)) < 120 and "\n" not in str(error)
    else:
        assert found == expected


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("above", [False, True])
def test_numbers_are_finite_and_within_bounds(text, above):
    try:
        found = number(0, above=above, most=1e6)(text)
    except argparse.ArgumentTypeError as error:
        assert len(str(error)) < 120 and "\n" not in str(error)
    else:
        assert found == float(Fraction(text)) and (found > 0 if above else found >= 0) and found <= 1e6


def trained(monkeypatch, *words: str) -> int | ArgumentError:
    monkeypatch.setattr(sys, "argv", ["examples.mnist", *QUICK, *words])
    try:
        return mnist.main()
    except ArgumentError as error:
        assert "\n" not in str(error)
        return error


def test_training_takes_or_refuses_any_number(monkeypatch, tmp_path):
    """What the parser lets through: the training refuses it in a line or takes one step with it."""
    monkeypatch.chdir(tmp_path)
    numbers = [option for option in options() if option.program.endswith("mnist") and is_number(option)]
    outcomes = []
    for option in numbers:
        if not FAMILY and option.flag not in SAMPLED:
            continue
        for text in HOSTILE if FAMILY else ("99999999",):
            for grammar in GRAMMARS.get(option.flag, ("{}",)):
                beside = ["--checkpoint=run.npz"] if "checkpoint" in option.flag else []
                beside += ["--trace=trace.json"] if "trace" in option.flag else []
                outcomes.append(trained(monkeypatch, f"{option.flag}={grammar.format(text)}", *beside))
    assert all(outcome == 0 or isinstance(outcome, ArgumentError) or outcome == 3 for outcome in outcomes)
    assert len(outcomes) >= len(SAMPLED)


def test_a_batch_beyond_its_shard_says_what_memory_it_would_take(monkeypatch):
    refused = trained(monkeypatch, "--batch-size=99999999")
    size = format_size(99999999 * 28 * 28 * 4)
    assert isinstance(refused, ArgumentError)
    assert str(refused).startswith("batch_size: expected at most ") and f"images alone would take {size} a rank" in str(
        refused
    )
    # shards of different lengths have no largest batch: it is the whole shard, whatever was asked for
    assert trained(monkeypatch, "--batch-size=99999999", "--uneven-inputs=join") == 0


@pytest.mark.parametrize("words", [["--max=9999999GiB"], ["--min=99999999GiB", "--max=99999999GiB"]])
def test_sizes_beyond_memory_are_refused_before_it_is_taken(words):
    with pytest.raises(ArgumentError) as caught:
        cli.main(["bench", "--iterations=1", "--windows=1", *words])
    assert re.match(
        r"--max: expected a value whose memory this host has, got \d+GiB, which takes [\d.]+ GiB", one_line(caught)
    )


def test_memory_is_that_of_all_ranks_of_the_host():
    require_memory("--x", 1, host_bytes() // 3, 3)
    with pytest.raises(ArgumentError) as caught:
        require_memory("--x", "7GiB", host_bytes() // 3, 4)
    size, total = format_size(host_bytes() // 3), format_size(host_bytes())
    expected = f"got 7GiB, which takes {size} on each of 4 ranks of {total}"
    assert one_line(caught) == f"--x: expected a value whose memory this host has, {expected}"
