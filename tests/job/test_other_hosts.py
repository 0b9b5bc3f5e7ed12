"""Queries between hosts: what is answered, and what is not."""

from __future__ import annotations

import itertools
import json
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clcomm.comm.watch import other_hosts
from clcomm.comm.watch.other_hosts import DUMP, LARGEST, PROGRESS, TOKEN_BYTES, Address, OtherHosts, packed, unpacked
from clcomm.comm.watch.stall_message import UNKNOWN
from clcomm.comm.watch.status_page import RankStatus, StatusPage

TOKEN = bytes(range(TOKEN_BYTES))
HERE = ["127.0.0.1"]


def pages(ranks: list[int]) -> list[StatusPage]:
    memory = memoryview(bytearray(2048 * (1 + len(ranks))))
    return [StatusPage(memory, ranks, own) for own in ranks]


@pytest.fixture
def hosts():
    """Rank 0 on a host of its own, and ranks 1 and 2, which share one, without their network: only rank 2 answers."""
    alone, pair = pages([0]), pages([1, 2])
    asking, answering = OtherHosts(alone[0], TOKEN), OtherHosts(pair[1], TOKEN)
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    silent.bind(("127.0.0.1", 0))  # rank 1, which is stopped
    asking.know([{1: Address(HERE, silent.getsockname()[1]), 2: answering.address(HERE)}])
    yield asking, answering, pair, silent
    for each in (asking, answering, silent):
        each.close()


def test_one_rank_that_can_answer_answers_for_its_host(hosts) -> None:
    asking, _, pair, _ = hosts
    pair[0].write(7, 1, "barrier #3", "train.py:5 in main")
    pair[1].write(0, 0, "", "train.py:9 in load")
    first, second = asking.ask()
    assert (first.rank, first.key, first.text, first.place) == (1, 7, "barrier #3", "train.py:5 in main")
    assert (second.rank, second.waits, second.place) == (2, False, "train.py:9 in load")
    assert first.state == second.state == "running" and first.began_ns < second.beat_ns


def test_a_host_on_which_nobody_answers_is_unknown(hosts, monkeypatch) -> None:
    asking, answering, _, _ = hosts
    monkeypatch.setattr(other_hosts, "ASK_S", 0.3)
    answering.close()
    assert [(line.rank, line.state) for line in asking.ask()] == [(1, UNKNOWN), (2, UNKNOWN)]
    asking.know([{1: Address([], 1), 2: Address([], 1)}])
    assert [(line.rank, line.state) for line in asking.ask()] == [(1, UNKNOWN), (2, UNKNOWN)]


def test_who_does_not_know_the_token_is_not_answered(hosts) -> None:
    _, answering, pair, silent = hosts
    address = ("127.0.0.1", answering.address(HERE).port)
    for question in (b"", b"?", bytes(TOKEN_BYTES) + PROGRESS, TOKEN[:-1] + DUMP, bytes(LARGEST)):
        silent.sendto(question, address)
    silent.sendto(TOKEN + PROGRESS, address)
    silent.settimeout(60)
    answer = silent.recv(LARGEST)
    assert answer.startswith(TOKEN) and [line.rank for line in unpacked(answer[TOKEN_BYTES:])] == [1, 2]
    silent.setblocking(False)
    with pytest.raises(BlockingIOError):  # questions are answered in their order: nothing came of the others
        silent.recv(1)
    assert pair[0].dump_folder == ""


def test_ranks_of_another_host_dump_when_they_are_asked_to(hosts, tmp_path, monkeypatch, capfd) -> None:
    asking, _, pair, _ = hosts
    monkeypatch.setenv("CLCOMM_DUMP_DIR", str(tmp_path))
    for _ in range(2):
        asking.ask(DUMP)
    (folder,) = tmp_path.iterdir()
    assert pair[0].dump_folder == str(folder)
    assert capfd.readouterr().err.count(f"what each rank did last is in {folder}/rank-*.json") == 1


def test_lines_of_many_ranks_fit_into_one_datagram() -> None:
    several = pages(list(range(256)))
    for page in several:
        page.write(1, 1, "all_reduce 'ä' #1", "é" * 900)
    (datagram,) = packed(several[0].read())
    assert len(datagram) + TOKEN_BYTES <= LARGEST
    assert [line.rank for line in unpacked(datagram)] == list(range(256))


numbers = st.sampled_from([0, 1, 2**63 - 1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)
texts = st.text(max_size=40) | st.builds(
    lambda part, times: part * times, st.sampled_from(['"', "\\", "\0", "\x1f", "é", "\U0001f600", "\ud800", "a"]),
    st.integers(0, 1920),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    count=st.sampled_from([1, 2, 33, 34, 300, 600, 999, 1000]) | st.integers(1, 1000),
    drawn=st.lists(st.tuples(numbers, numbers, numbers, texts, texts), min_size=1, max_size=4),
)
def test_every_line_of_any_number_of_ranks_with_any_texts_arrives(count, drawn) -> None:
    """The answer is as few datagrams as its bytes need, none above the limit, and texts are cut at their ends."""
    lines = [
        RankStatus(rank, beat, key, began, rank % 2 == 1, "running", text, place)
        for rank, (beat, key, began, text, place) in zip(range(count), itertools.cycle(drawn), strict=False)
    ]
    datagrams = packed(lines)
    sizes = [len(datagram) + TOKEN_BYTES for datagram in datagrams]
    assert max(sizes) <= LARGEST
    assert len(datagrams) <= 1 + sum(sizes) // (LARGEST - 2000), "a line takes less than 2,000 bytes"
    arrived = [line for datagram in datagrams for line in unpacked(datagram)]
    assert [(line.rank, line.key, line.dumped) for line in arrived] == [(x.rank, x.key, x.dumped) for x in lines]
    room = min(600, 20_000 // count)
    for sent, line in zip(lines, arrived, strict=True):
        for whole, cut in ((sent.text, line.text), (sent.place, line.place)):
            encodable = whole.encode(errors="replace").decode()
            kept = [len(json.dumps(part, ensure_ascii=False).encode()) - 2 for part in (cut, encodable)]
            assert encodable.startswith(cut) and kept[0] <= room
            if cut != encodable:
                longer = encodable[: len(cut) + 1]
                assert len(json.dumps(longer, ensure_ascii=False).encode()) - 2 > room, "no more would have fit"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("ranks", [1, 40, 1000])
@pytest.mark.parametrize("text", ["", '"' * 1900, "\1" * 1900, "é" * 900])
def test_a_host_with_many_ranks_answers(ranks, text) -> None:
    alone, several = pages([ranks]), pages(list(range(ranks)))
    for page in several:
        page.write(2**63 - 1, 0, text, text)
    asking, answering = OtherHosts(alone[0], TOKEN), OtherHosts(several[0], TOKEN)
    try:
        asking.know([dict.fromkeys(range(ranks), answering.address(HERE))])
        assert [(line.rank, line.state) for line in asking.ask()] == [(rank, "running") for rank in range(ranks)]
    finally:
        asking.close()
        answering.close()


@pytest.mark.parametrize(
    "answer", [b"", b"{", b"[1]", b"[[]]", b'[["x",1,1,1,1,"","",""]]', b"\xff", b"[" * 60_000, b'{"a": 1}', b"null"]
)
def test_an_answer_that_is_none_is_passed_over(answer) -> None:
    assert unpacked(answer) == []


def test_a_line_keeps_what_it_says_and_its_age() -> None:
    (page,) = pages([5])
    page.write(9, 1, "x", "y")
    (datagram,) = packed(page.read())
    (line,) = unpacked(datagram)
    assert line[4:] == page.read()[0][4:] and line.key == 9
    assert abs(line.beat_ns - page.read()[0].beat_ns) < 60e9
    assert json.loads(datagram)[0][0] == 5
