"""Datasets: normalised as PyTorch does, split for good, refused in one line where parts do not fit."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import DataError
from clcomm.base.host.arrays import aligned_empty
from tests.helpers import cpu_device
from training.data import datasets
from training.data.datasets import ArrayDataset, load_digits, load_mnist, load_synthetic, mean_and_std
from training.data.idx import write_idx
from training.engines.gather import DeviceGather

IMAGES = np.random.default_rng(0).integers(0, 256, (50, 3, 5, 4), dtype=np.uint8)
LABELS = np.arange(50) % 10


def write_mnist(root, train=30, test=10, side=6, suffix=".gz", classes=10):
    """Write a small set under MNIST's file names; return (train images, train labels)."""
    random = np.random.default_rng(1)
    root.mkdir(parents=True, exist_ok=True)
    written = []
    for part, count in (("train", train), ("t10k", test)):
        images = random.integers(0, 256, (count, side, side), dtype=np.uint8)
        labels = (np.arange(count) % classes).astype(np.uint8)
        write_idx(root / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(root / f"{part}-labels-idx1-ubyte{suffix}", labels)
        written += [images, labels]
    return written


def nearest_centre_accuracy(splits):
    """Accuracy of the simplest classifier: a set that it cannot learn is of no use as a stand-in."""
    train, test = (split.batch(np.arange(len(split))) for split in (splits.train, splits.test))
    centres = np.stack([train[0][train[1] == kind].mean(0).ravel() for kind in range(splits.train.classes)])
    scores = test[0].reshape(len(test[0]), -1) @ centres.T - (centres**2).sum(1) / 2
    return (scores.argmax(1) == test[1]).mean()


@given(st.lists(st.integers(0, 49), max_size=20))
def test_a_batch_is_the_normalised_samples(indices):
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    got, labels = ArrayDataset(IMAGES, LABELS, name="set", mean=mean, std=std).batch(np.array(indices, dtype=int))
    per_channel = (np.array(mean)[:, None, None], np.array(std)[:, None, None])
    want = (IMAGES[indices].astype(np.float64) / 255 - per_channel[0]) / per_channel[1]
    assert got.dtype == np.float32 and got.flags.c_contiguous and labels.dtype == np.int32
    np.testing.assert_allclose(got, want.reshape(got.shape), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(labels, LABELS[indices])


def test_normalisation_is_torchvisions():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    values = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    got, _ = ArrayDataset(values, np.zeros(1, int), name="set", mean=0.1307, std=0.3081).batch(np.array([0]))
    want = torch.from_numpy(values.copy()).to(torch.float32).div(255).sub(0.1307).div(0.3081)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize(("mean", "std"), [(0.3, 0.7), ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_device_gathers_the_same_batches_into_memory_that_is_used_again(mean, std, read_only):
    images = aligned_empty(IMAGES.shape, np.uint8)
    images[...] = IMAGES
    images.flags.writeable = not read_only  # as memory of another rank is
    dataset, plain = (ArrayDataset(images, LABELS, name="set", mean=mean, std=std) for _ in range(2))
    prepared: list[np.ndarray] = []
    gather = DeviceGather(cpu_device("cpu"))

    def prepare(*arguments):
        prepared.append(arguments[-1])
        return gather(*arguments)

    dataset.prepare_gather = prepare
    places = [dataset.new_batch(6) for _ in range(2)]
    for number in range(7):
        indices = np.random.default_rng(number).integers(-len(IMAGES), len(IMAGES), 6)
        got, want = dataset.batch(indices, places[number % 2]), plain.batch(indices)
        assert got[0] is places[number % 2][0]
        assert [each.tobytes() for each in got] == [each.tobytes() for each in want]
    assert len(prepared) == 2  # by NumPy the first time, by the device from then on
    for outside in (-len(IMAGES) - 1, len(IMAGES)):
        with pytest.raises(IndexError):
            dataset.batch(np.array([0, 0, 0, 0, 0, outside]), places[0])


def test_images_that_a_device_does_not_take_are_gathered_by_numpy():
    images = np.random.default_rng(2).normal(size=(6, 1, 2, 2)).astype(np.float32)
    dataset = ArrayDataset(images, np.zeros(6, int), name="set")
    asked, gather = [], DeviceGather(cpu_device("cpu"))
    dataset.prepare_gather = lambda *arguments: (asked.append(arguments), gather(*arguments))[1]
    place = dataset.new_batch(2)
    for _ in range(3):
        np.testing.assert_array_equal(dataset.batch(np.array([5, 0]), place)[0], images[[5, 0]])
    assert len(asked) == 1


def test_float_images_and_batches_that_are_nobody_elses_memory():
    images = np.random.default_rng(2).normal(size=(6, 1, 2, 2)).astype(np.float32)
    dataset = ArrayDataset(images, np.zeros(6, int), name="set")
    before = images.copy()
    got, _ = dataset.batch(np.array([4, 1]))
    np.testing.assert_array_equal(got, images[[4, 1]])
    got[:] = 0
    dataset.batch(np.array([4]))[0][:] = 0
    np.testing.assert_array_equal(images, before)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"images": IMAGES[:, 0]}, r"expected images \(N, C, H, W\)"),
        ({"images": IMAGES.astype(float)}, "uint8 or float32.*float64"),
        ({"labels": LABELS[:-1]}, "expected 50 whole numbers"),
        ({"labels": LABELS.astype(float)}, "float64"),
        ({"classes": 9}, "labels of 0 to 8, got 0 to 9"),
        ({"labels": LABELS - 1}, "got -1 to 8"),
        ({"mean": (0.1, 0.2)}, "mean as one number or 3"),
        ({"mean": float("nan")}, "mean as one number"),
        ({"std": 0.0}, "std above 0"),
    ],
)
def test_parts_that_do_not_fit_are_named(change, said):
    arguments = {"images": IMAGES, "labels": LABELS} | change
    with pytest.raises(DataError, match=said) as caught:
        ArrayDataset(arguments.pop("images"), arguments.pop("labels"), name="set", **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".gz", ""])
def test_an_own_set_under_mnists_names(tmp_path, suffix):
    written = write_mnist(tmp_path, suffix=suffix, classes=4)
    splits = load_mnist(tmp_path, name="own")
    assert (len(splits.train), len(splits.test), splits.name) == (30, 10, "own")
    assert splits.train.classes == splits.test.classes == 4 and splits.train.image_shape == (1, 6, 6)
    np.testing.assert_array_equal(splits.train.images[:, 0], written[0])
    np.testing.assert_array_equal(splits.test.labels, written[3])
    got, _ = splits.train.batch(np.arange(30))
    assert abs(got.mean()) < 1e-5 and abs(got.std() - 1) < 1e-5


def test_names_with_a_dot_are_found_too(tmp_path):
    write_mnist(tmp_path, suffix="")
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / path.name.replace("-idx", ".idx"))
    assert len(load_mnist(tmp_path).train) == 30


def test_files_that_do_not_belong_together_are_named(tmp_path):
    write_mnist(tmp_path)
    labels = tmp_path / "t10k-labels-idx1-ubyte.gz"
    write_idx(labels, np.zeros(11, np.uint8))
    with pytest.raises(DataError, match=r"t10k-labels.*expected dimensions 10, got 11"):
        load_mnist(tmp_path)
    labels.unlink()
    with pytest.raises(DataError, match=r"expected the file t10k-labels-idx1-ubyte or .*found none"):
        load_mnist(tmp_path)
    write_idx(labels, np.full(10, 10, np.uint8))
    with pytest.raises(DataError, match="labels of 0 to 9, got 10 to 10"):
        load_mnist(tmp_path)
    write_mnist(tmp_path, train=0)
    with pytest.raises(DataError, match="at least one training"):
        load_mnist(tmp_path, name="own")


def test_mean_and_std_match_numpy():
    mean, std = mean_and_std(IMAGES)
    assert mean == pytest.approx(IMAGES.mean() / 255, rel=1e-12)
    assert std == pytest.approx(IMAGES.std() / 255, rel=1e-12)
    assert mean_and_std(np.zeros((2, 1, 2, 2), np.uint8)) == (0.0, 1.0)


def test_real_mnist():
    root = os.environ.get("CLCOMM_DATA")
    if not root or not datasets.find_mnist_files(root):
        pytest.skip("CLCOMM_DATA names no directory with MNIST's files")
    splits = load_mnist(root)
    assert splits.train.images.shape == (60000, 1, 28, 28) and splits.test.images.shape == (10000, 1, 28, 28)
    assert np.bincount(splits.test.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert mean_and_std(splits.train.images) == pytest.approx((0.1307, 0.3081), abs=1e-4)


def test_digits_are_real_fixed_and_learnable():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    splits = load_digits()
    assert splits.train.images.shape == (1437, 1, 28, 28) and splits.test.images.shape == (360, 1, 28, 28)
    assert splits.train.labels[:12].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5, 2, 8]
    again = load_digits()
    assert again.train.images.tobytes() == splits.train.images.tobytes()
    assert nearest_centre_accuracy(splits) > 0.85


def test_digits_come_from_the_package_where_their_file_moved(monkeypatch):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    want = load_digits()
    monkeypatch.setattr(datasets.Path, "is_file", lambda _: False)
    got = load_digits()
    assert got.train.images.tobytes() == want.train.images.tobytes()
    np.testing.assert_array_equal(got.test.labels, want.test.labels)


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setattr(datasets.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DataError, match=r"scikit-learn.*not installed"):
        load_digits()


def test_synthetic_is_seeded_and_learnable():
    first, again, other = load_synthetic(600, 200), load_synthetic(600, 200), load_synthetic(600, 200, seed=1)
    assert first.train.images.tobytes() == again.train.images.tobytes()
    assert first.train.images.tobytes() != other.train.images.tobytes()
    assert nearest_centre_accuracy(first) > 0.95
    odd = load_synthetic(20, 5, shape=(3, 9, 7), classes=3)
    assert odd.train.image_shape == (3, 9, 7) and set(odd.train.labels) == {0, 1, 2}
