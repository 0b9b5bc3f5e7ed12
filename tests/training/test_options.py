"""Options by keyword and on the command line: the same defaults, the same values, the same refusals."""

from __future__ import annotations

import importlib.util
import math
import re
from argparse import BooleanOptionalAction
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clcomm.base.errors import ArgumentError
from examples.cifar import CifarOptions
from tests.faults.launch import job
from tests.helpers import one_line
from tests.option_values import HOSTILE
from training.command_line import parser
from training.comparison.options import ComparisonOptions
from training.option_fields import Options, flag
from training.options import DEFAULT_LR, TrainingOptions
from training.text_options import TextOptions

KINDS = [TrainingOptions, ComparisonOptions]
#: A value beside the default of each option that takes text of a certain form.
TEXTS = {
    "policy": "diloco:h=9", "compression": "fp16", "trace_limit": "1MiB", "checkpoint_every": 3, "target_accuracy": 0.5,
    "otlp": "http://localhost:4318", "variants": ["auto"], "metrics_port": "0.0.0.0:3", "plot": "times.svg",
}  # fmt: skip
#: What an option needs beside it.
NEEDS = {"checkpoint_every": {"checkpoint": "run.npz"}, "nesterov": {"momentum": 0.5}}
EXCLUDED = [
    {"nesterov": True, "optimizer": "adam"}, {"nesterov": True, "momentum": 0.0},
    {"sharded_optimizer": True, "engine": "torch"}, {"sharded_optimizer": True, "no_bucketing": True},
    {"compression": "demo:32", "clip_norm": 1.0},
    {"split_tensors": True, "compression": "int8"}, {"compression": "zip"}, {"uneven_inputs": "join", "overlap": "on"},
    {"eval": False, "target_accuracy": 0.9}, {"trace": "t.json", "trace_limit": "much"},
    {"elastic": True, "sharding": "contiguous"}, {"elastic": True, "sharded_optimizer": True},
    {"elastic": True, "trace": "t.json"}, {"resume": ""}, {"checkpoint_every": 3}, {"otlp": "localhost:4318"},
    {"balance": "auto", "overlap": "on"}, {"balance": "auto", "sharding": "contiguous"}, {"balance": "auto", "zero": 2},
]  # fmt: skip


def parsed(kind: type[Options], *words: str) -> Options:
    return kind(**vars(parser("x", "", kind).parse_args(words)))


def words_of(kind: type[Options], given: dict[str, Any]) -> list[str]:
    """Return the command line that gives these values."""
    words = []
    for name, value in given.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else f"--no-{name}")
        else:
            words += [flag(name), *value] if isinstance(value, list) else [f"{flag(name)}={value}"]
    return words


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_the_command_lines(kind: type[Options]) -> None:
    assert kind() == parsed(kind)
    actions = {action.dest: action for action in parser("x", "", kind)._actions if action.dest != "help"}
    assert [each.name for each in fields(kind)] == list(actions)
    for each in fields(kind):
        action = actions[each.name]
        assert action.default == each.default, each.name
        assert action.option_strings[0] == flag(each.name)
        if each.default is not None and not isinstance(each.default, bool):
            assert f"default: {each.default}" in (action.help or "") % {"default": action.default}, each.name


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_has_the_same_value_both_ways(kind: type[Options], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # exporters need packages of extras
    for action in parser("x", "", kind)._actions:
        if action.dest == "help" or (kind is ComparisonOptions and action.dest in ("sharded_optimizer", "zero")):
            continue
        value: Any = TEXTS.get(action.dest)
        if action.nargs == 0:
            value = not isinstance(action, BooleanOptionalAction)
        elif action.choices:
            value = list(action.choices)[-1]
        elif value is None:
            value = "3" if action.type is None else 3
        given = {**NEEDS.get(action.dest, {}), action.dest: value}
        by_hand = kind(**given)
        assert by_hand == parsed(kind, *words_of(kind, given)) != kind(), action.dest
        assert getattr(by_hand, action.dest) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("given", EXCLUDED, ids=str)
def test_what_is_refused_is_refused_both_ways(given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as by_hand:
        TrainingOptions(**given)
    with pytest.raises(ArgumentError) as typed:
        parsed(TrainingOptions, *words_of(TrainingOptions, given))
    assert one_line(by_hand) == one_line(typed)


@pytest.mark.parametrize("kind", KINDS)
def test_values_out_of_bounds_are_refused_both_ways(kind: type[Options], monkeypatch: pytest.MonkeyPatch) -> None:
    refused = 0
    for action in parser("x", "", kind)._actions:
        if action.type is None and not action.choices:
            continue
        for value in (*HOSTILE, True, math.nan, -1, 0.5, b"3", ["1"]):
            by_hand = {**NEEDS.get(action.dest, {}), action.dest: value}
            words = words_of(kind, {**by_hand, action.dest: str(value)})
            outcome = value_or_refusal(action.dest, partial(kind, **by_hand))
            assert outcome == value_or_refusal(action.dest, partial(parsed, kind, *words)), (action.dest, value)
            refused += outcome is ArgumentError
    assert refused > 300


def value_or_refusal(name: str, make: Callable[[], Options]) -> Any:
    try:
        return getattr(make(), name)
    except ArgumentError as error:
        assert "\n" not in str(error) and flag(name) in str(error)
        return ArgumentError


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"model": "vgg"}, "--model: expected one of convnet, mlp, lenet, resnet, got 'vgg'"),
        ({"model": 3}, "--model: expected one of convnet, mlp, lenet, resnet, got 3"),
        ({"batch_size": 0}, "--batch-size: expected a whole number from 1 up, got '0'"),
        ({"batch_size": None}, "--batch-size: expected a whole number from 1 up, got 'None'"),
        ({"lr": -0.1}, "--lr: expected a number above 0, got '-0.1'"),
        ({"quiet": "no"}, "--quiet: expected True or False, got 'no'"),
        ({"report": 3}, "--report: expected text, got 3"),
        ({"bucket_size": 1.5}, "--bucket-size: expected text, got 1.5"),
        (
            {"target_accuracy": 101},
            "--target-accuracy: expected a share such as 0.98 or a percentage such as 98, got 101",
        ),
    ],
)
def test_a_value_of_another_type_is_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        TrainingOptions(**given)
    assert one_line(caught) == line


def test_variants_are_texts() -> None:
    with pytest.raises(ArgumentError, match="--variants: expected a list of texts, got '64KiB'"):
        ComparisonOptions(variants="64KiB")


def test_unknown_options_are_refused_and_known_ones_stay() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize'"):
        TrainingOptions(batchsize=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'checkpoint'"):
        ComparisonOptions(checkpoint="run.npz")  # type: ignore[call-arg]
    with pytest.raises(FrozenInstanceError):
        TrainingOptions().batch_size = 3  # type: ignore[misc]


def test_options_that_follow_from_others(tmp_path: Path) -> None:
    assert {name: TrainingOptions(optimizer=name).learning_rate for name in DEFAULT_LR} == DEFAULT_LR
    assert {name: replace(TrainingOptions(), optimizer=name).settings()["lr"] for name in DEFAULT_LR} == DEFAULT_LR
    assert TrainingOptions(optimizer="adam", lr=0.5).learning_rate == 0.5
    assert TrainingOptions(resume="a.npz", checkpoint="b.npz").resume_from == "a.npz"
    assert TrainingOptions(checkpoint=tmp_path / "run.npz", resume="").resume_from == str(tmp_path / "run.npz")
    assert (TextOptions().clip_norm, TextOptions(compression="demo:32").clip_norm) == (1.0, None)
    assert TrainingOptions(target_accuracy=98).target_accuracy == 0.98
    settings = TrainingOptions(report="run.json", quiet=True, epochs=3).settings()
    assert settings["epochs"] == 3 and not {"report", "quiet", "checkpoint", "trace"} & set(settings)


PROGRAM = """
from training.options import TrainingOptions
from training.session import Session

def main():
    rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
    session = Session(TrainingOptions(model="mlp", data="synthetic", max_steps=3, device="cpu", {given}))
    result = session.run()
    if session.comm.rank == 0:
        print(result.steps, result.evaluation.samples, session.comm.size)

run(main)
"""


def test_a_program_trains_without_a_command_line(tmp_path: Path) -> None:
    ended = job(tmp_path, PROGRAM.format(given="quiet=True"), ranks=2)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[-1] == "3 1024 2"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            "batch_size=16 + rank",
            "--batch-size: expected the same on every rank, got 16 on rank 0, 17 on rank 1",
        ),
        ("report='/dev/null'", "--report: expected a file to write, got '/dev/null'"),
        ("log_csv='/proc/no/log.csv'", "--log-csv: expected a file to write, got '/proc/no/log.csv'"),
        ("engine='cuda'", "--engine: expected one of native, netcl, torch, got 'cuda'"),
    ],
)
def test_a_programs_mistakes_are_those_of_the_command_line(tmp_path: Path, given: str, line: str) -> None:
    ended = job(tmp_path, PROGRAM.format(given=given), ranks=2)
    (said,) = ended.clcomm_lines()
    assert ended.code == 2 and said.startswith(f"clcomm: {line}")


@pytest.mark.parametrize("kind", [TrainingOptions, TextOptions, ComparisonOptions, CifarOptions])
def test_help_shows_a_dozen_options_and_help_all_the_others(kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            parser("examples.any", "An example.", kind).parse_args([option])
        shown[option] = capsys.readouterr().out
    usual, every = (set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", text, re.MULTILINE)) for text in shown.values())
    assert {"--help", "--help-all", "--batch-size", "--max-steps", "--lr", "--report"} < usual < every
    assert len(usual) <= 16 and f"--help-all shows {len(every - usual)} other options" in shown["--help"]
    assert every >= {flag(each.name) for each in fields(kind) if each.metadata["option"].group}
    assert len(shown["--help"].splitlines()) < 50


def test_the_help_names_learning_rates_in_words() -> None:
    shown = " ".join(parser("examples.mnist", "", TrainingOptions).format_help().split())
    said = shown.partition("--lr RATE default: ")[2].partition(" --")[0]
    rates = {float(rate): names for rate, names in re.findall(r"([\d.e-]+) for (\w+(?: and \w+)*)", said)}
    assert {name: rate for rate, names in rates.items() for name in names.split(" and ")} == DEFAULT_LR
    assert "{" not in re.sub(r"\{[\w,.-]+\}", "", shown)  # no dict, only choices


@pytest.mark.parametrize("scheme", ["fp16", "int8", "topk:0.1", "powersgd:2"])
def test_split_tensors_are_not_compressed(scheme: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        TrainingOptions(compression=scheme, split_tensors=True)
    assert one_line(caught) == "--split-tensors: expected no --compression with it, which needs whole tensors"
    TrainingOptions(compression=scheme)
    TrainingOptions(split_tensors=True)
