"""Horovod's environment variables: the table, its page, and what the mapped ones do."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.base.errors import ArgumentError
from clcomm.horovod import environment
from clcomm.horovod.environment import HONOURED, IGNORED, MAPPED, TABLE, kind_of
from tests.helpers import one_line

PAGE = Path(__file__).parents[1] / "proofs" / "horovod-variables.md"


def test_the_page_has_the_table():
    rows = re.findall(r"^[|] (`HOROVOD_.*`) [|] (\w+) [|] (.*) [|]$", PAGE.read_text(), re.MULTILINE)
    assert rows == [
        (", ".join(f"`HOROVOD_{name}`" for name in names.split()), kind, text) for names, kind, text in TABLE
    ]


def test_every_variable_has_a_kind():
    kinds = {"HOROVOD_TIMELINE": HONOURED, "HOROVOD_LOG_LEVEL": MAPPED, "HOROVOD_AUTOTUNE_LOG": IGNORED,
             "HOROVOD_FUSION_THRESHOLD": IGNORED, "HOROVOD_ANYTHING": IGNORED}  # fmt: skip
    assert {name: kind_of(name) for name in kinds} == kinds


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {}),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "60"}, {"stall_warning_s": 60.0}),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}, {"timeout_s": 0.0}),
        (
            {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "60"},
            {"stall_warning_s": 0.0, "timeout_s": 0.0},
        ),
    ],
)
def test_stall_checks_are_the_communicators_limits(monkeypatch, given, options):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert environment.communicator_options() == options


def test_the_level_is_that_of_the_messages(monkeypatch):
    log = logging.getLogger("clcomm")
    monkeypatch.setattr(log, "level", log.level)
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "ERROR")
    environment.communicator_options()
    assert log.level == logging.ERROR
    for name in ("HOROVOD_LOG_LEVEL", "HOROVOD_STALL_CHECK_TIME_SECONDS"):
        monkeypatch.setenv(name, "often")
        with pytest.raises(ArgumentError) as caught:
            environment.communicator_options()
        assert name in one_line(caught)
        monkeypatch.delenv(name)


def test_ignored_ones_are_named_in_one_line(monkeypatch, caplog):
    for name in ("HOROVOD_CYCLE_TIME", "HOROVOD_AUTOTUNE", "HOROVOD_TIMELINE"):
        monkeypatch.setenv(name, "1")
    environment.name_ignored()
    assert caplog.messages == ["horovod: ignored: HOROVOD_AUTOTUNE, HOROVOD_CYCLE_TIME; docs/horovod.md says why"]
