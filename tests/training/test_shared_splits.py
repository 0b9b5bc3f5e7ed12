"""A dataset once a host: what is published is what other ranks map, and what cannot be mapped is refused."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from clcomm.communicator import Communicator
from clcomm.errors import DataError
from training.data import open_data as open_data_module
from training.data import shared_splits
from training.data.datasets import ArrayDataset, Splits, load_synthetic
from training.data.open_data import open_data
from training.data.shared_splits import adopt, publish


def same_bits(mine, theirs):
    """Assert that two datasets give the same batches, and say the same about themselves."""
    order = np.random.default_rng(0).permutation(len(mine))[:50]
    for one, other in zip(mine.batch(order), theirs.batch(order), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert (mine.name, mine.classes, mine.image_shape) == (theirs.name, theirs.classes, theirs.image_shape)


@pytest.fixture
def published():
    splits = load_synthetic(300, 70, shape=(3, 5, 7))
    publication = publish(splits)
    if publication is None:
        pytest.skip("this system has no files without a name")
    yield splits, publication.notice
    publication.close()


def test_what_is_mapped_is_what_was_published(published):
    splits, notice = published
    found = adopt([notice])
    same_bits(splits.train, found.train)
    same_bits(splits.test, found.test)
    assert found.default_epochs == splits.default_epochs
    assert not found.train.images.flags.writeable and not found.train.labels.flags.writeable


def test_a_training_set_alone_and_float_images():
    images = np.random.default_rng(1).standard_normal((60, 2, 3, 3), np.float32)
    train = ArrayDataset(images, np.arange(60) % 4, name="own", classes=4, mean=(0.5, 0.25), std=(2.0, 3.0))
    publication = publish(Splits(train, None, 3))
    found = adopt([publication.notice])
    publication.close()
    assert found.test is None
    same_bits(train, found.train)


def test_mapped_memory_outlives_the_publication():
    splits = load_synthetic(100, 20)
    publication = publish(splits)
    found = adopt([publication.notice])
    publication.close()
    same_bits(splits.train, found.train)


def test_other_files_and_hosts_are_refused(published, tmp_path):
    _, notice = published
    other = tmp_path / "other"
    other.write_bytes(b"\0" * notice.nbytes)
    assert adopt([]) is None
    assert adopt([replace(notice, host="elsewhere")]) is None
    assert adopt([replace(notice, path=str(tmp_path / "absent"))]) is None
    assert adopt([replace(notice, path=str(other))]) is None, "another process's file of the same number"
    assert adopt([replace(notice, nbytes=notice.nbytes + 1)]) is None
    assert adopt([replace(notice, path=str(other)), notice]) is not None


def test_a_system_without_such_files_publishes_nothing(monkeypatch):
    before = len(os.listdir("/proc/self/fd"))

    def no_room(*_):
        raise OSError("no space")

    monkeypatch.setattr(os, "pwrite", no_room)
    assert publish(load_synthetic(10, 10)) is None
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.delattr(os, "memfd_create")
    assert publish(load_synthetic(10, 10)) is None


@pytest.mark.mpi(min_size=1)
def test_one_rank_of_a_host_reads_for_all(monkeypatch):
    comm = Communicator()
    reads = []
    monkeypatch.setattr(open_data_module, "load", lambda *_: reads.append(1) or load_synthetic(200, 40))
    splits = open_data("synthetic", comm, lambda line: None)
    same_bits(load_synthetic(200, 40).train, splits.train)
    same_bits(load_synthetic(200, 40).test, splits.test)
    assert sum(comm.all_gather_object(len(reads))) == 1


@pytest.mark.mpi(min_size=2)
def test_ranks_that_cannot_map_read(monkeypatch):
    comm = Communicator()
    reads = []
    monkeypatch.setattr(open_data_module, "load", lambda *_: reads.append(1) or load_synthetic(200, 40))
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(shared_splits, "_map", lambda notice: None)
    splits = open_data("synthetic", comm, lambda line: None)
    same_bits(load_synthetic(200, 40).train, splits.train)
    assert sum(comm.all_gather_object(len(reads))) == 2


@pytest.mark.mpi(min_size=2)
def test_without_publication_every_rank_reads(monkeypatch):
    comm = Communicator()
    monkeypatch.setattr(open_data_module, "publish", lambda splits: None)
    reads = []
    monkeypatch.setattr(open_data_module, "load", lambda *_: reads.append(1) or load_synthetic(200, 40))
    open_data("synthetic", comm, lambda line: None)
    assert comm.all_gather_object(len(reads)) == [1] * comm.size


@pytest.mark.mpi(min_size=2)
def test_the_reading_ranks_failure_is_everyones(monkeypatch):
    comm = Communicator()

    def unreadable(*_):
        raise DataError("/data: cannot be read")

    monkeypatch.setattr(open_data_module, "load", unreadable)
    with pytest.raises(DataError) as caught:
        open_data("synthetic", comm, lambda line: None)
    assert set(comm.all_gather_object(str(caught.value))) == {"/data: cannot be read"}
