"""Shifted and mirrored training images: as from the seed, whatever the ranks, the batches and the thread."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.sync.sampler import DistributedSampler
from training.data.augment import ShiftAndMirror
from training.data.datasets import ArrayDataset
from training.data.loader import Batch, Loader

SAMPLES, SHAPE = 30, (2, 5, 7)


def dataset() -> ArrayDataset:
    images = np.random.default_rng(0).integers(1, 256, (SAMPLES, *SHAPE)).astype(np.uint8)
    return ArrayDataset(images, np.arange(SAMPLES), name="set", classes=SAMPLES, mean=(0.25, 0.5), std=(0.5, 2.0))


def samples_of(batches: Iterable[Batch]) -> dict[int, bytes]:
    """Return each sample's image by its label."""
    pairs = (zip(labels.tolist(), images, strict=True) for images, labels in batches)
    return {label: image.tobytes() for batch in pairs for label, image in batch}


def loaded(ranks: int, batch: int, prefetch: int, held: int, epoch: int = 3, seed: int = 1) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for rank in range(ranks):
        train = dataset()
        loader = Loader(
            train, DistributedSampler(SAMPLES, rank, ranks, seed=5), batch, prefetch=prefetch, held=held,
            augment=ShiftAndMirror(seed, SAMPLES, train.black),
        )  # fmt: skip
        for _ in loader.epoch(epoch - 1):  # another epoch before
            pass
        found |= samples_of(loader.epoch(epoch))
    return found


def test_a_sample_does_not_depend_on_ranks_batches_and_threads() -> None:
    expected = loaded(1, 4, 0, 0)
    assert len(expected) == SAMPLES
    for ranks, batch, prefetch, held in ((1, 30, 2, 1), (3, 4, 2, 2), (2, 7, 0, 1)):
        assert loaded(ranks, batch, prefetch, held) == expected
    assert loaded(1, 4, 0, 0, epoch=4) != expected and loaded(1, 4, 0, 0, seed=2) != expected


@given(
    height=st.integers(1, 9), width=st.integers(1, 9), padding=st.integers(0, 6), seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 2**40),
)  # fmt: skip
def test_images_are_crops_of_the_padded_image_and_of_its_mirror(height, width, padding, seed, epoch) -> None:
    shape = (2, height, width)
    images = np.arange(5 * 2 * height * width, dtype=np.float32).reshape(5, *shape)
    filler = np.float32([[[-1.0]], [[-2.0]]])
    changed = images.copy()
    ShiftAndMirror(seed, 9, filler, padding)(changed, np.array([3, 0, 8, 1, 2]), epoch)
    for before, after in zip(images, changed, strict=True):
        padded = np.broadcast_to(filler, (2, height + 2 * padding, width + 2 * padding)).copy()
        crops = set()
        for image in (before, before[:, :, ::-1]):
            padded[:, padding : padding + height, padding : padding + width] = image
            crops |= {
                padded[:, top : top + height, left : left + width].tobytes()
                for top in range(2 * padding + 1) for left in range(2 * padding + 1)
            }  # fmt: skip
        assert after.tobytes() in crops


def test_all_shifts_come_equally_often_and_half_are_mirrored() -> None:
    drawn = ShiftAndMirror(0, 40_000)._drawn(0)
    for column, kinds in ((0, 9), (1, 9), (2, 2)):
        counts = np.bincount(drawn[:, column], minlength=kinds)
        assert len(counts) == kinds and np.abs(counts / len(drawn) - 1 / kinds).max() < 0.01
    assert abs(np.corrcoef(drawn.T) - np.eye(3)).max() < 0.03


def test_black_is_what_lies_outside() -> None:
    train = dataset()
    np.testing.assert_array_equal(train.black, np.float32([[[-0.5]], [[-0.25]]]))
    plain = ArrayDataset(train.images, train.labels, name="set", classes=SAMPLES)
    assert plain.black == 0


@pytest.mark.parametrize("start", [0, 2, 5])
def test_a_resumed_epoch_has_the_batches_of_the_whole_one(start: int) -> None:
    def loader() -> Loader:
        return Loader(dataset(), DistributedSampler(SAMPLES, 0, 1), 5, augment=ShiftAndMirror(4, SAMPLES))

    whole = [images.tobytes() for images, _ in loader().epoch(2)]
    assert [images.tobytes() for images, _ in loader().epoch(2, start)] == whole[start:]
