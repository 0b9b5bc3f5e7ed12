"""The settings of a Synchronizer: what its arguments become, and what is decided where there are no buckets."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import fields

import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.sync.settings import EXCLUDED, Option, SyncSettings
from clcomm.sync.synchronizer import Synchronizer
from tests.helpers import one_line
from training.options import TrainingOptions


@pytest.fixture
def solo():
    return Communicator(transport="solo", bucket_size="2MiB")


@pytest.mark.parametrize(
    ("bucket_size", "nbytes", "is_auto"),
    [(None, 2 << 20, False), ("auto", 2 << 20, True), ("64KiB", 64 << 10, False), (1000, 1000, False)],
)
def test_a_bucket_size_is_the_communicators_unless_it_is_given(solo, bucket_size, nbytes, is_auto):
    settings = SyncSettings(solo, bucket_size=bucket_size)
    assert (settings.bucket_nbytes, settings.is_auto) == (nbytes, is_auto)
    assert settings.use_bucketing is solo.use_bucketing


@pytest.mark.parametrize("overlap", [None, 1, "on", "Auto", b"auto"])
def test_other_words_for_overlap_are_refused(solo, overlap):
    with pytest.raises(ArgumentError) as caught:
        SyncSettings(solo, overlap=overlap)
    assert one_line(caught) == f"overlap: expected True, False or 'auto', got {overlap!r}"


def test_a_hook_is_something_to_call_for_whole_tensors(solo):
    whole, split = (Synchronizer(solo, split_tensors=splits) for splits in (False, True))
    whole.register_comm_hook(print)
    split.register_comm_hook(None)
    with pytest.raises(ArgumentError, match=r"^hook: expected something to call"):
        whole.register_comm_hook(3)
    with pytest.raises(ArgumentError, match=r"^split_tensors: expected False"):
        split.register_comm_hook(print)
    assert (whole.compression, split.compression) == ("print", "none")


#: What is given of a Synchronizer's argument that the table has.
GIVEN = {
    "zero": 2, "split_tensors": True, "overlap": "auto", "check_replicas_every": 3, "check_start": False,
    "check_finite": True, "precision": "bf16", "shards": 4, "policy": "diloco:h=4", "hook": ("compression", "int8"),
}  # fmt: skip


@pytest.mark.parametrize("reverses", [False, True])
def test_arguments_that_exclude_each_other_are_refused(solo, reverses):
    """In one line that names both, in whichever order they are given."""
    seen = 0
    for excluded, settings in EXCLUDED.items():
        for setting in settings:
            names = [excluded.partition(":")[0], setting]
            if not GIVEN.keys() >= {*names}:
                continue  # an argument of a call
            given = [GIVEN[name] if name == "hook" else (name, GIVEN[name]) for name in names]
            with pytest.raises(ArgumentError) as caught:
                Synchronizer(solo, **dict(reversed(given) if reverses else given))
            assert one_line(caught).startswith(f"{excluded} with "), (given, caught.value)
            seen += 1
    assert seen == 12


def test_a_constructor_has_the_declared_arguments(solo):
    """And a refusal names it, as other constructors' do."""
    given, kept = inspect.signature(Synchronizer).parameters, Synchronizer(solo, bucket_size="1KiB").models.settings
    assert [*given] == [each.name for each in fields(SyncSettings)]
    assert str(given["bucket_size"]) == "bucket_size: 'int | str | None' = None" and kept.bucket_size == 1024
    assert given["use_bucketing"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {each.kind for each in [*given.values()][2:]} == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(TypeError, match=r"^Synchronizer.__init__\(\) got an unexpected keyword argument 'buckets'"):
        Synchronizer(solo, buckets=3)


def test_an_option_of_the_examples_has_the_declared_help():
    for option in fields(TrainingOptions):
        declared = vars(SyncSettings).get(option.name)
        if isinstance(declared, Option) and declared.help:
            assert option.metadata["option"].help == declared.help


def test_without_buckets_only_what_was_to_be_measured_is_decided(solo):
    cases = itertools.product((True, False), (None, "auto"), (True, False, "auto"))
    for use_bucketing, bucket_size, overlap in cases:
        settings = SyncSettings(solo, use_bucketing, bucket_size=bucket_size, overlap=overlap)
        expected = [("overlap", "off")] if overlap == "auto" else []
        if bucket_size == "auto" and use_bucketing:
            expected.append(("bucket_size", "none"))
        assert [(each.what, each.chosen) for each in settings.decisions_without_buckets()] == expected
