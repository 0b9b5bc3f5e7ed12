"""Calls: the tag by which ranks find out whether they are in the same collective."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clcomm.comm.stats.events import Call

CALL = Call("all_reduce", "gradients", "shared", 4000, op="sum", count=1000, dtype=np.dtype("float32"), bucket=3)
#: For each field that ranks must agree on, values other than CALL's.
COMPARED: dict[str, list[Any]] = {
    "operation": ["broadcast", "all_reduce "], "label": ["", "gradient", "gradients'"], "transport": ["mpi"],
    "op": ["", "mean"], "count": [-1, 999, 1001], "dtype": [None, np.dtype("int32"), np.dtype("float64")],
    "shape": [(), (40, 25), (25, 40)], "bucket": [-1, 2, 31], "root": [0, 3], "prepared": [1, 3],
    "is_aligned": [False], "compared": ["", "float32"], "nbytes": [0, 3999],
}  # fmt: skip
#: Fields in which ranks may differ: how they meet, and whom a message is for.
FREE: dict[str, list[Any]] = {"through_mpi": [True], "is_counted": [False], "peer": [1], "takes_any": [True]}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in COMPARED for value in COMPARED[name]])
def test_a_difference_in_what_ranks_must_agree_on_changes_the_tag(name: str, value: Any) -> None:
    assert replace(CALL, **{name: value}).tag != CALL.tag


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in FREE for value in FREE[name]])
def test_ranks_may_differ_in_the_rest(name: str, value: Any) -> None:
    assert replace(CALL, **{name: value}).tag == CALL.tag


def test_what_is_compared_instead_leaves_label_and_bucket_free() -> None:
    call = replace(CALL, compared="float16")
    assert replace(call, label="", bucket=-1).tag == call.tag
    assert len({call.tag, replace(call, nbytes=3999).tag, replace(call, compared="float32").tag, CALL.tag}) == 4


def test_every_field_is_compared_or_free() -> None:
    assert {*COMPARED, *FREE} == set(CALL.__dataclass_fields__)


def test_tags_are_the_same_in_every_process_and_differ_between_calls() -> None:
    """A constant shows that no seed of the process is in it; room for the sequence number is left below 2**63."""
    assert Call("barrier", "", "shared").tag == 471613446931323558
    named = {name: others for name, others in COMPARED.items() if name not in ("compared", "shape", "nbytes")}
    values = [[getattr(CALL, name), *others] for name, others in named.items()]
    calls = [replace(CALL, **dict(zip(named, chosen, strict=True))) for chosen in itertools.product(*values)]
    tags = {call.tag for call in calls}
    assert len(tags) == len(calls) > 10_000 and min(tags) >= 0 and max(tags) < 1 << 62
