"""CIFAR-10's files, its download, and what stands in for it."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from clcomm.base.errors import DataError
from examples.cifar import CifarOptions
from tests.training.test_download import mirrors  # noqa: F401 - a fixture
from tests.training.test_open_data import machine, refusal, write_set  # noqa: F401 - a fixture
from training.data import choose as choose_module
from training.data import cifar
from training.data.choose import choose, load
from training.data.datasets import load_synthetic


def content(number: int, samples: int = 6) -> bytes:
    """Return a file's bytes: labels, then pixels of channel c that are all 10 * number + c."""
    records = np.zeros((samples, 3073), np.uint8)
    records[:, 0] = np.arange(samples) + number
    records[:, 1:] = np.repeat(10 * number + np.arange(3), 1024)
    records[:, 1] = 255  # the first pixel of the first channel
    return records.tobytes()


FILES = {name: content(number) for number, name in enumerate((*cifar.TRAIN_FILES[:4], cifar.TEST_FILE))}
FILES[cifar.TRAIN_FILES[4]] = content(3, 2)


def write_cifar(root: Path) -> Path:
    root.mkdir(parents=True)
    for name, data in FILES.items():
        (root / name).write_bytes(data)
    return root


def archive() -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as made:
        for name, data in FILES.items():
            member = tarfile.TarInfo(f"{cifar.FOLDER}/{name}")
            member.size = len(data)
            made.addfile(member, io.BytesIO(data))
    return held.getvalue()


def test_files_are_read_in_order(tmp_path):
    splits = cifar.load_cifar10(write_cifar(tmp_path / "c"))
    train, test = splits.train, splits.test
    assert train.image_shape == (3, 32, 32) and len(train) == 26 and len(test) == 6
    assert train.labels[:7].tolist() == [0, 1, 2, 3, 4, 5, 1] and test.labels.tolist() == [4, 5, 6, 7, 8, 9]
    assert train.images[6, :, 1, 1].tolist() == [10, 11, 12] and train.images[6, :, 0, 0].tolist() == [255, 11, 12]
    images, _ = train.batch(np.array([6]))
    expected = (np.array([255, 11, 12]) / 255 - cifar.MEAN) / cifar.STD
    np.testing.assert_allclose(images[0, :, 0, 0], expected, rtol=1e-5)
    assert cifar.load_cifar10(tmp_path / "c", with_test=False).test is None


@pytest.mark.parametrize("cut", [b"", content(0)[:-1], b"\x0a" + content(0)[1:]])
def test_damaged_files_are_named(tmp_path, cut):
    root = write_cifar(tmp_path / "c")
    (root / "data_batch_3.bin").write_bytes(cut)
    text = refusal(cifar.load_cifar10, root)
    assert "data_batch_3.bin: expected" in text


def test_places_are_searched_in_order(tmp_path, machine, monkeypatch):  # noqa: F811
    cached = write_cifar(tmp_path / "cache" / "clcomm" / "cifar10")
    assert choose("cifar10").directory == choose("cifar").directory == str(cached)
    local = write_cifar(tmp_path / "data" / "cifar10" / cifar.FOLDER)
    assert choose("cifar10").directory == str(local)
    named = write_cifar(tmp_path / "elsewhere" / cifar.FOLDER)
    monkeypatch.setenv("CLCOMM_DATA", str(tmp_path / "elsewhere"))
    choice = choose("cifar")
    assert (choice.directory, choice.name, choice.as_cifar) == (str(named), "cifar10", False)
    assert len(load(choice).train) == 26


@pytest.fixture
def no_cifar(monkeypatch):
    def fail(target, **_):
        raise DataError("cifar10: download failed (no connection)")

    monkeypatch.setattr(cifar, "download_cifar10", fail)


def test_another_set_stands_in_and_one_line_says_so(tmp_path, machine, no_cifar):  # noqa: F811
    assert "no cifar10 files in" in refusal(choose, "cifar10") and "no connection" in refusal(choose, "cifar10")
    write_set(tmp_path / "data" / "mnist")
    choice = choose("cifar")
    assert choice.as_cifar and choice.note.endswith("training on own at 3x32x32") and "\n" not in choice.note
    write_set(tmp_path / "data" / "fashion-mnist")
    choice = choose("cifar")
    assert choice.note.endswith("training on fashion-mnist at 3x32x32")
    grey = load(choose(str(tmp_path / "data" / "fashion-mnist")))
    splits = load(choice)
    assert splits.train.image_shape == (3, 32, 32) and splits.train.name == "fashion-mnist"
    for ours, theirs in ((splits.train, grey.train), (splits.test, grey.test)):
        assert ours.labels.tolist() == theirs.labels.tolist() and ours.mean == theirs.mean
        np.testing.assert_array_equal(ours.images[:, :, 14:18, 14:18], np.repeat(theirs.images, 3, 1))
        assert int(ours.images.sum()) == 3 * int(theirs.images.sum())


def test_without_any_files_the_digits_stand_in(tmp_path, machine, no_cifar):  # noqa: F811
    pytest.importorskip("sklearn")
    splits = load(choose("cifar"))
    assert splits.name == "digits" and splits.train.image_shape == (3, 32, 32) and splits.default_epochs == 40


def test_sets_that_cannot_stand_in():
    for shape in ((3, 8, 8), (1, 33, 8)):
        with pytest.raises(DataError, match="expected grey images of at most 32 x 32 pixels"):
            cifar.as_cifar(load_synthetic(20, 10, shape=shape))


def test_offline_nothing_is_asked_for(tmp_path, machine, monkeypatch):  # noqa: F811
    monkeypatch.setattr(cifar, "download_cifar10", lambda *_, **__: pytest.fail("downloaded"))
    monkeypatch.setenv("CLCOMM_OFFLINE", "1")
    assert "download switched off by CLCOMM_OFFLINE" in refusal(choose, "cifar10")


def test_the_archive_is_downloaded_checked_and_unpacked(tmp_path, mirrors, monkeypatch):  # noqa: F811
    packed = archive()
    mirror = mirrors({"cifar.tar.gz": packed})
    monkeypatch.setattr(cifar, "URL", mirror.url + "cifar.tar.gz")
    monkeypatch.setattr(cifar, "MD5", hashlib.md5(packed).hexdigest())
    lines: list[str] = []
    cifar.download_cifar10(tmp_path / "new", report=lines.append)
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == FILES
    assert len(lines) == 1 and "downloading cifar10 from 127.0.0.1" in lines[0]


@pytest.mark.parametrize("fault", ["checksum", "missing", "truncated", "without a file"])
def test_a_download_that_fails_leaves_nothing(tmp_path, mirrors, monkeypatch, fault):  # noqa: F811
    packed = archive() if fault != "truncated" else archive()[: len(archive()) // 2]
    if fault == "without a file":
        held = io.BytesIO()
        with tarfile.open(fileobj=held, mode="w:gz"):
            pass
        packed = held.getvalue()
    mirror = mirrors({} if fault == "missing" else {"cifar.tar.gz": packed})
    monkeypatch.setattr(cifar, "URL", mirror.url + "cifar.tar.gz")
    monkeypatch.setattr(cifar, "MD5", "0" if fault == "checksum" else hashlib.md5(packed).hexdigest())
    text = refusal(cifar.download_cifar10, tmp_path / "new")
    assert "cifar10: download failed (" in text and list((tmp_path / "new").iterdir()) == []


def test_the_examples_defaults():
    options = CifarOptions()
    assert (options.model, options.data, options.augment, options.weight_decay) == ("resnet", "cifar", True, 5e-4)
    assert not CifarOptions(augment=False).augment
    assert choose_module.CHOICES[-2:] == ("cifar10", "cifar")
