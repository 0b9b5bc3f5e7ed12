"""What --data stands for on this machine, and that all ranks follow rank 0."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import DataError, name_ranks
from clcomm.comm.communicator import Communicator
from training.data import choose as choose_module
from training.data import download
from training.data import open_data as open_data_module
from training.data.choose import choose
from training.data.datasets import MNIST_FILES, load_synthetic
from training.data.idx import write_idx
from training.data.open_data import open_data


def write_set(root, count=20, value=None):
    root.mkdir(parents=True, exist_ok=True)
    for part in ("train", "t10k"):
        images = np.arange(count * 16, dtype=np.int64).astype(np.uint8).reshape(count, 4, 4)
        write_idx(root / f"{part}-images-idx3-ubyte.gz", images if value is None else np.full_like(images, value))
        write_idx(root / f"{part}-labels-idx1-ubyte.gz", (np.arange(count) % 3).astype(np.uint8))
    return root


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """An empty home and working directory, and a network on which nothing answers; the calls are listed."""
    calls = []

    def no_network(remote, target, **_):
        calls.append(remote.name)
        raise DataError(f"{remote.name}: download failed (mirror.invalid: no connection)")

    monkeypatch.delenv("CLCOMM_DATA", raising=False)
    monkeypatch.delenv("CLCOMM_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(choose_module, "cache_directory", lambda: tmp_path / "cache" / "clcomm")
    monkeypatch.setattr(download, "download", no_network)
    return calls


def refusal(call, *arguments):
    with pytest.raises(DataError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_auto_looks_in_order(tmp_path, machine, monkeypatch):
    """The environment's place before ./data before the cache; nothing is downloaded while one of them has it."""
    cached = write_set(tmp_path / "cache" / "clcomm" / "mnist")
    assert choose("auto").directory == str(cached)
    local = write_set(tmp_path / "data" / "mnist")
    assert choose("auto").directory == str(local)
    named = write_set(tmp_path / "elsewhere")
    monkeypatch.setenv("CLCOMM_DATA", str(named))
    assert choose("auto").directory == str(named)
    parent = write_set(tmp_path / "elsewhere" / "mnist")
    assert choose("auto").directory == str(parent)
    monkeypatch.setenv("CLCOMM_DATA", "elsewhere")
    assert choose("auto").directory == str(parent)
    assert machine == []


def test_torchvisions_layout_is_found(tmp_path, machine):
    raw = write_set(tmp_path / "data" / "MNIST" / "raw")
    assert choose("mnist").directory == str(raw)


def test_auto_falls_back_on_digits_in_one_line(machine):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    said: list[str] = []
    splits = open_data("auto", None, said.append)
    assert splits.name == "digits" and len(splits.train) == 1437 and machine == ["mnist"]
    assert len(said) == 1 and "\n" not in said[0]
    assert "no connection" in said[0] and "training on the digits bundled with scikit-learn" in said[0]


def test_auto_with_nothing_at_all(machine, monkeypatch):
    monkeypatch.setattr(choose_module, "digits_available", lambda: False)
    text = refusal(open_data, "auto")
    assert "no connection" in text and "scikit-learn" in text and "--data synthetic" in text


def test_a_named_set_never_becomes_another(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("CLCOMM_DATA", str(tmp_path / "nowhere"))
    (tmp_path / "nowhere").mkdir()
    for name in ("mnist", "fashion-mnist"):
        text = refusal(open_data, name)
        assert f"no {name} files in" in text and "nowhere" in text and "--data or CLCOMM_DATA" in text
    assert machine == ["mnist", "fashion-mnist"]


def test_offline_is_respected(machine, monkeypatch):
    monkeypatch.setenv("CLCOMM_OFFLINE", "1")
    assert "switched off by CLCOMM_OFFLINE" in refusal(open_data, "mnist")
    assert machine == []


def test_an_incomplete_directory_is_an_error_but_an_incomplete_cache_is_not(tmp_path, machine):
    cached = write_set(tmp_path / "cache" / "clcomm" / "mnist")
    (cached / (MNIST_FILES[0] + ".gz")).unlink()
    assert "no connection" in refusal(open_data, "mnist")
    local = write_set(tmp_path / "data" / "mnist")
    (local / (MNIST_FILES[2] + ".gz")).unlink()
    assert f"expected the file {MNIST_FILES[2]}" in refusal(open_data, "mnist")


def test_a_download_is_used_and_kept(tmp_path, machine, monkeypatch):
    monkeypatch.setattr(download, "download", lambda remote, target, **_: write_set(target))
    said: list[str] = []
    splits = open_data("mnist", None, said.append)
    target = tmp_path / "cache" / "clcomm" / "mnist"
    assert len(splits.train) == 20 and f"downloaded to {target}" in said[-1]
    monkeypatch.setattr(download, "download", lambda *_, **__: pytest.fail("the cache was not used"))
    assert choose("mnist").directory == str(target)


def test_a_path(tmp_path, machine):
    root = write_set(tmp_path / "mine")
    splits = open_data("mine", None, lambda line: None)
    assert (splits.name, splits.train.classes, len(splits.train)) == ("own", 3, 20)
    assert choose(str(root)).directory == str(root)
    assert "which is neither" in refusal(open_data, "mnits")
    (tmp_path / "empty").mkdir()
    assert "found none of them" in refusal(open_data, "empty")
    (root / (MNIST_FILES[0] + ".gz")).write_bytes(b"no IDX")
    assert "not an IDX file" in refusal(open_data, "mine")


def test_the_two_sets_of_the_same_file_names_are_told_apart(tmp_path, machine, monkeypatch):
    root = write_set(tmp_path / "set")
    monkeypatch.setenv("CLCOMM_DATA", str(root))
    monkeypatch.setattr(download, "matches", lambda content, md5: md5 == download.MNIST.md5[MNIST_FILES[3]])
    assert choose("mnist").name == choose("auto").name == "mnist"
    assert "no fashion-mnist files" in refusal(open_data, "fashion-mnist")
    monkeypatch.setattr(download, "matches", lambda content, md5: md5 == download.FASHION_MNIST.md5[MNIST_FILES[3]])
    assert choose("fashion-mnist").name == choose("auto").name == "fashion-mnist"
    assert "no mnist files" in refusal(open_data, "mnist")
    monkeypatch.setattr(download, "matches", lambda content, md5: False)
    assert choose("mnist").name == "own"


def test_digits_and_synthetic_need_no_files(machine):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    assert open_data("digits", None, lambda line: None).name == "digits"
    assert open_data("synthetic", None, lambda line: None).name == "synthetic"
    assert machine == []


def test_the_test_set_may_stay_unread(tmp_path, machine):
    root = write_set(tmp_path / "mine")
    whole = open_data(str(root), None, lambda line: None)
    (root / (MNIST_FILES[2] + ".gz")).write_bytes(b"damaged")
    splits = open_data(str(root), None, lambda line: None, with_test=False)
    assert splits.test is None and splits.train.classes == whole.train.classes
    np.testing.assert_array_equal(splits.train.images, whole.train.images)
    assert MNIST_FILES[2] in refusal(open_data, str(root))


@pytest.mark.mpi(min_size=2)
def test_rank_0_alone_decides_and_speaks(monkeypatch):
    said: list[str] = []
    comm = Communicator()
    wanted = {0: "synthetic"}.get(comm.rank, "mnist")
    splits = open_data(wanted, comm, said.append)
    assert splits.name == "synthetic"
    assert len(said) == (comm.rank == 0)


@pytest.mark.mpi(min_size=2)
def test_rank_0s_failure_is_everyones():
    comm = Communicator()
    texts = comm.all_gather_object(refusal(open_data, "no-such-set" if comm.rank == 0 else "synthetic", comm))
    assert len(set(texts)) == 1 and "no-such-set" in texts[0]


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_cannot_read_stops_all(monkeypatch):
    comm = Communicator()
    monkeypatch.setattr(open_data_module, "open_publication", lambda: None)  # every rank reads, the last one first
    if comm.rank == 0:

        def unreadable(*_):
            raise DataError("/data: cannot be read")

        monkeypatch.setattr(open_data_module, "load", unreadable)
    texts = comm.all_gather_object(refusal(open_data, "synthetic", comm))
    assert len(set(texts)) == 1
    assert f"rank 0 of {comm.size} cannot read what rank 0 chose: /data: cannot be read" in texts[0]


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_reads_something_else_stops_all(monkeypatch):
    comm = Communicator()
    monkeypatch.setattr(open_data_module, "open_publication", lambda: None)
    if comm.rank > 0:
        monkeypatch.setattr(open_data_module, "load", lambda *_: load_synthetic(seed=1))
    texts = comm.all_gather_object(refusal(open_data, "synthetic", comm))
    assert len(set(texts)) == 1
    assert f"{name_ranks(range(1, comm.size))} of {comm.size} read other data" in texts[0]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("seed", range(12))
def test_one_other_bit_anywhere_in_the_data_stops_all(monkeypatch, seed):
    comm, draw = Communicator(), np.random.default_rng(seed)
    monkeypatch.setattr(open_data_module, "open_publication", lambda: None)
    splits = load_synthetic(300, 50)
    part = splits.train if draw.random() < 0.7 else splits.test
    array = part.images if draw.random() < 0.7 else part.labels
    changed = array.copy()
    changed.reshape(-1)[draw.integers(changed.size)] ^= 1
    if comm.rank == comm.size - 1:
        object.__setattr__(part, "images" if array is part.images else "labels", changed)
    monkeypatch.setattr(open_data_module, "load", lambda *_: splits)
    texts = comm.all_gather_object(refusal(open_data, "synthetic", comm))
    assert len(set(texts)) == 1 and f"rank {comm.size - 1} of {comm.size} read other data" in texts[0]


@pytest.mark.mpi(min_size=1)
def test_data_that_one_rank_reads_for_all_is_not_hashed(monkeypatch):
    monkeypatch.setattr(open_data_module._Attempt, "fingerprint", property(lambda attempt: pytest.fail("hashed")))
    with Communicator() as comm:
        open_data("synthetic", comm, lambda line: None)


@pytest.mark.mpi(min_size=2)
def test_a_damaged_file_is_one_plain_error_on_every_rank(tmp_path):
    comm = Communicator()
    root = comm.broadcast_object(str(tmp_path) if comm.rank == 0 else None)
    if comm.rank == 0:
        path = write_set(tmp_path) / (MNIST_FILES[0] + ".gz")
        path.write_bytes(path.read_bytes()[:-20])
    comm.barrier()
    texts = comm.all_gather_object(refusal(open_data, root, comm))
    comm.barrier()
    assert len(set(texts)) == 1 and "train-images" in texts[0] and "cut off" in texts[0]
