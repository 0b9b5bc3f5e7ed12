"""A dataset once a host: what is published is what other ranks map, and what cannot be mapped is refused."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from clcomm.base.errors import DataError
from clcomm.comm.communicator import Communicator
from training.data import open_data as open_data_module
from training.data import shared_splits
from training.data.datasets import ArrayDataset, Splits, load_synthetic
from training.data.open_data import open_data
from training.data.shared_splits import Publication, adopt, open_publication


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
    publication = open_publication()
    if publication is None:
        pytest.skip("this system has no files without a name")
    yield splits, publication.publish(splits)
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
    publication = Publication()
    found = adopt([publication.publish(Splits(train, None, 3))])
    publication.close()
    assert found.test is None
    same_bits(train, found.train)


def test_mapped_memory_outlives_the_publication():
    splits = load_synthetic(100, 20)
    publication = Publication()
    found = adopt([publication.publish(splits)])
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


def test_what_is_read_into_the_file_is_published_from_there(monkeypatch):
    """Only the token is written; labels, which are elsewhere, and part of an array, are written as well."""
    publication, written = Publication(), []
    images = publication.allocate((30, 1, 5, 7), np.dtype("uint8"))
    images[...] = np.random.default_rng(2).integers(0, 256, images.shape)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, view, at: written.append(len(view)) or pwrite(file, view, at))
    labels = np.arange(30) % 4
    train = ArrayDataset(images, labels, name="own", classes=4, mean=0.5, std=2.0)
    test = ArrayDataset(images[:20], labels[:20], name="own", classes=4, mean=0.5, std=2.0)
    found = adopt([publication.publish(Splits(train, test, 3))])
    publication.close()
    assert written == [train.labels.nbytes, images[:20].nbytes, test.labels.nbytes, 16]
    same_bits(train, found.train)
    same_bits(test, found.test)


def test_without_room_in_the_file_arrays_lie_outside(monkeypatch):
    publication = Publication()
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    images = publication.allocate((30, 1, 5, 7), np.dtype("uint8"))
    images[...] = 3
    train = ArrayDataset(images, np.arange(30) % 4, name="own", classes=4, mean=0.5, std=2.0)
    found = adopt([publication.publish(Splits(train, None, 3))])
    publication.close()
    same_bits(train, found.train)
    assert publication.allocate((0, 3), np.dtype("float32")).shape == (0, 3)


def no_room(*_):
    raise OSError("no space")


def test_a_system_without_such_files_has_no_publication(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert open_publication() is None


@pytest.mark.mpi(min_size=2)
def test_a_file_that_is_full_is_not_published(monkeypatch):
    comm, before, reads = Communicator(), len(os.listdir("/proc/self/fd")), []
    monkeypatch.setattr(os, "pwrite", no_room)
    monkeypatch.setattr(open_data_module, "load", lambda *_: reads.append(1) or load_synthetic(200, 40))
    splits = open_data("synthetic", comm, lambda line: None)
    same_bits(load_synthetic(200, 40).train, splits.train)
    assert comm.all_gather_object(len(reads)) == comm.size * [1]
    assert len(os.listdir("/proc/self/fd")) == before


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
    monkeypatch.setattr(open_data_module, "open_publication", lambda: None)
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
