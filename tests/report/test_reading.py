"""Files of runs: what they have to be, what is refused, and that their order makes no difference."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import DataError
from clcomm.base.storage.field_checks import MOST_ITEMS, signed_number
from clcomm.insight.report import formats
from clcomm.insight.report.formats import as_html
from clcomm.insight.report.record import SCHEMA
from clcomm.insight.report.recording import MOST_BYTES, parse, read_runs
from clcomm.insight.report.report import build
from tests.report.runs import apart, document, written

WHOLE = document(3)
TEXT = json.dumps(WHOLE)


def replaced(path: str, value: object) -> dict:
    """Return the whole document with one field, named by its path, replaced."""
    changed = copy.deepcopy(WHOLE)
    *way, last = path.split(".")
    place = changed
    for step in way:
        place = place[int(step)] if isinstance(place, list) else place[step]
    place[int(last) if isinstance(place, list) else last] = value
    return changed


def test_a_run_comes_back_as_it_was(tmp_path):
    run = read_runs(written(tmp_path, [WHOLE]))
    assert run.problems == [] and run.world_size == 3 and [record["rank"] for record in run.ranks] == [0, 1, 2]
    assert run.stats().as_dict() == WHOLE["communication"]
    assert run.figures["layout"] == WHOLE["layout"] and run.figures["images_per_s"] == 18000.0


def test_files_of_ranks_make_the_same_whole_in_any_order(tmp_path):
    whole = build(read_runs(written(tmp_path, [WHOLE])))
    names = written(tmp_path, apart(WHOLE))
    for order in itertools.permutations(names):
        assert build(read_runs(order)) == whole


@given(st.permutations(range(3)), st.lists(st.integers(0, 2), max_size=3), st.data())
def test_any_cut_into_files_makes_the_same_whole(tmp_path_factory, order, again, data):
    """Files may hold any ranks, some of them twice."""
    cuts = sorted(data.draw(st.sets(st.integers(1, 2))))
    groups = [order[begin:end] for begin, end in itertools.pairwise([0, *cuts, 3])] + [[rank] for rank in again]
    documents = [{**WHOLE, "ranks": [WHOLE["ranks"][rank] for rank in group]} for group in groups]
    run = read_runs(written(tmp_path_factory.mktemp("cut"), documents))
    assert run.problems == []
    assert run.stats().as_dict() == WHOLE["communication"]
    assert run.ranks == read_runs(written(tmp_path_factory.mktemp("whole"), [WHOLE])).ranks


BROKEN = {
    "empty": b"",
    "cut off": TEXT.encode()[: len(TEXT) // 2],
    "no JSON": b"\x00\xff\xfe not text",
    "a list": b"[1, 2]",
    "another program's": b'{"traceEvents": []}',
    "NaN": TEXT.replace("18000.0", "NaN").encode(),
    "too large a number": TEXT.replace("18000.0", "1e999").encode(),
    "thousands of digits": TEXT.replace("18000.0", "9" * 5000).encode(),
    "nested too deep": b"[" * 100_000,
    "an older schema": json.dumps({**WHOLE, "schema": 2}).encode(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_by_name_and_the_others_merge(tmp_path, name):
    good = written(tmp_path, apart(WHOLE))
    bad = tmp_path / "bad.json"
    bad.write_bytes(BROKEN[name])
    run = read_runs([str(bad), *good])
    (problem,) = run.problems
    assert name != "nested too deep" or problem.endswith("got JSON that is nested too deeply")
    assert problem.startswith(f"{bad}: ") and "\n" not in problem and problem.isprintable()
    assert run.stats().as_dict() == WHOLE["communication"]
    with pytest.raises(DataError, match=r"bad\.json: "):
        read_runs([str(bad)])


WRONG = {
    "world_size": [0, -1, 1.0, True, "3", None, 1 << 40],
    "images_per_s": [-1.0, "fast", [1]],
    "model": ["a\x1b[2Jb", "x" * 1000, 5, "two\nlines"],
    "layout": [[1], [[-1]], "x"],
    "ceilings": [[{"transport": "shared"}]],
    "decisions": [["free text"], [{"what": "bucket size"}]],
    "ranks": [[], {}, None],
    "ranks.0.rank": [1, 3, -1, "0", None],
    "ranks.0.host_name": ["\u202e"],
    "ranks.0.sums": ["abacus", 1, ["numpy"]],
    "ranks.0.device_in_caller": [1, "yes"],
    "ceilings.0.sums": ["abacus", None],
    "ranks.0.peak_rss_bytes": [-5, 1.5],
    "ranks.0.stats.tallies.0.bucket": [-2, "0"],
    "ranks.0.stats.tallies.1.calls": [0, 61, 1 << 70],
    "ranks.0.stats.tallies.1.wait_ns": [1 << 50, -1],
    "ranks.0.stats.tallies.1.histogram": ["1:1", "99999:60", "5:-1", "5", "a:b", 7, None],
    "ranks.0.stats.tallies.0.operation": ["\x07", None],
    "ranks.0.stats.phases.0": [[], ["pack", "", 0, 1, 2], ["pack", "", 0, 1, 2, -3]],
    "ranks.0.stats.late": [[[0, 0, 1, 1]], [[0, 1, 1, 1], [0, 1, 1, 1]]],
    "ranks.0.stats.events": [[1, 2, 3], None],
}


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in WRONG.items() for value in values])
def test_a_field_of_another_kind_is_refused_and_named(path, value):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as refused:
        parse(json.dumps(replaced(path, value)).encode())
    named = [step for step in path.split(".") if not step.isdigit()]
    assert named[-1] in str(refused.value) or named[-2] in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("world_size", 0, f"world_size: expected a whole number from 1 to {MOST_ITEMS}, got 0"),
        ("hosts", MOST_ITEMS + 1, f"hosts: expected a whole number from 1 to {MOST_ITEMS}, got {MOST_ITEMS + 1}"),
        ("ranks.0.host", -1, f"ranks[0].host: expected a whole number from 0 to {MOST_ITEMS}, got -1"),
        ("batch_size", -1, "batch_size: expected a whole number from 0 up, got -1"),
        ("ranks.1.rank", 0, "ranks: expected distinct numbers from 0 to 2, at least one"),
        ("ranks.1.rank", 3, "ranks: expected distinct numbers from 0 to 2, at least one"),
        ("ranks", [], "ranks: expected distinct numbers from 0 to 2, at least one"),
        ("schema", 2, f"schema: expected {SCHEMA}, got 2; repeat the run to write a new file"),
    ],
)
def test_a_message_names_the_bounds_that_hold(path, value, said):
    with pytest.raises(ValueError, match=r"\A" + re.escape(said) + r"\Z"):
        parse(json.dumps(replaced(path, value)).encode())


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), 1e300, pytest.param(-(10**400), id="400 digits"), "1", None, True, [1]],
)
def test_a_loss_is_any_finite_number(value):
    for finite in (-1e299, -1, -0.5, 0, 3, 1e299):
        assert signed_number(finite, "loss") == finite
    with pytest.raises(ValueError, match=r"\Aloss: expected a finite number, got "):
        signed_number(value, "loss")


def test_another_runs_file_is_refused(tmp_path):
    first, second, third = apart(WHOLE)
    run = read_runs(written(tmp_path, [first, {**second, "run": "other"}, third]))
    assert [record["rank"] for record in run.ranks] == [0, 2]
    assert run.problems == [f"{tmp_path}/run-1.json: belongs to another run: run is 'other', not '5eed'"]
    assert "1 rank of 3 missing here: 1" in build(run).headline[0]


def test_the_same_rank_twice_has_to_be_the_same(tmp_path):
    other = copy.deepcopy(WHOLE)
    other["ranks"][1]["steps"] = 1
    run = read_runs(written(tmp_path, [WHOLE, WHOLE, other]))
    assert run.problems == [f"{tmp_path}/run-2.json: rank 1 is in an earlier file, with different figures"]
    assert run.stats().as_dict() == WHOLE["communication"]


def test_only_regular_files_of_a_sane_size_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(MOST_BYTES + (1 << 20))
    (tmp_path / "folder").mkdir()
    names = [str(tmp_path / name) for name in ("pipe", "huge", "folder", "missing")]
    run = read_runs([*names, *written(tmp_path, [WHOLE])])
    texts = ["expected a regular file", "expected at most 256 MiB, got 257", "expected a regular file", "No such file"]
    assert [p.startswith(f"{n}: {t}") for p, n, t in zip(run.problems, names, texts, strict=True)] == [True] * 4


def leaves(value: object, path: tuple = ()):
    if isinstance(value, dict):
        for name, each in value.items():
            yield from leaves(each, (*path, name))
    elif isinstance(value, list) and value:
        for index, each in enumerate(value):
            yield from leaves(each, (*path, str(index)))
    else:
        yield path


LEAVES = [".".join(path) for path in leaves({name: v for name, v in WHOLE.items() if name != "communication"})]
values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.just([])
    | st.just({})
)


@given(st.sampled_from(LEAVES), values)
def test_whatever_a_field_holds_the_file_is_refused_or_shown(path, value):
    content = json.dumps(replaced(path, value)).encode()
    try:
        checked = parse(content)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    run = read_runs_of(checked)
    report = build(run)
    for write in (formats.as_json, formats.as_csv, formats.as_markdown, as_html):
        assert write(report)


def read_runs_of(checked: dict):
    from clcomm.insight.report.recording import Run

    return Run({name: value for name, value in checked.items() if name != "ranks"}, checked["ranks"])


@given(st.integers(0, len(TEXT)), st.randoms(use_true_random=False))
def test_damaged_bytes_are_refused_or_harmless(cut, rng: random.Random):
    content = bytearray(TEXT[:cut].encode() if rng.random() < 0.5 else TEXT.encode())
    for _ in range(min(3, len(content))):
        content[rng.randrange(len(content))] = rng.randrange(256)
    try:
        checked = parse(bytes(content))
    except ValueError as error:
        assert len(str(error)) < 1000
    else:
        build(read_runs_of(checked))
