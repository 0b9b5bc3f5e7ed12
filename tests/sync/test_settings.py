"""The settings of a Synchronizer: what its arguments become, and what is decided where there are no buckets."""

from __future__ import annotations

import itertools

import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.sync.settings import SyncSettings
from tests.helpers import one_line


@pytest.fixture
def solo():
    return Communicator(transport="solo", bucket_size="2MiB")


@pytest.mark.parametrize(
    ("bucket_size", "nbytes", "is_auto"),
    [(None, 2 << 20, False), ("auto", 2 << 20, True), ("64KiB", 64 << 10, False), (1000, 1000, False)],
)
def test_a_bucket_size_is_the_communicators_unless_it_is_given(solo, bucket_size, nbytes, is_auto):
    settings = SyncSettings.of(solo, None, bucket_size, None, False, False)
    assert (settings.bucket_size, settings.is_auto) == (nbytes, is_auto)
    assert settings.use_bucketing is solo.use_bucketing and settings.hook is None


@pytest.mark.parametrize("overlap", [None, 1, "on", "Auto", b"auto"])
def test_other_words_for_overlap_are_refused(solo, overlap):
    with pytest.raises(ArgumentError) as caught:
        SyncSettings.of(solo, None, None, None, False, overlap)
    assert one_line(caught) == f"overlap: expected True, False or 'auto', got {overlap!r}"


def test_a_hook_is_something_to_call_for_whole_tensors(solo):
    whole, split = (SyncSettings.of(solo, None, None, None, splits, False) for splits in (False, True))
    assert whole.with_hook(print).hook is print and whole.hook is None
    assert split.with_hook(None) == split
    with pytest.raises(ArgumentError, match=r"^hook: expected something to call"):
        whole.with_hook(3)
    with pytest.raises(ArgumentError, match=r"^split_tensors: expected False"):
        split.with_hook(print)


def test_without_buckets_only_what_was_to_be_measured_is_decided(solo):
    cases = itertools.product((True, False), (None, "auto"), (True, False, "auto"))
    for use_bucketing, bucket_size, overlap in cases:
        settings = SyncSettings.of(solo, use_bucketing, bucket_size, None, False, overlap)
        expected = [("overlap", "off")] if overlap == "auto" else []
        if bucket_size == "auto" and use_bucketing:
            expected.append(("bucket_size", "none"))
        assert [(each.what, each.chosen) for each in settings.decisions_without_buckets()] == expected
