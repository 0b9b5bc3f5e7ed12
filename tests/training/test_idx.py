"""IDX files come back as written, and every damaged one is refused in one line."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from clcomm.base.errors import DataError
from training.data.idx import read_idx, write_idx

DTYPES = ["uint8", "int8", "int16", "int32", "float32", "float64"]
SAMPLE = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
SAMPLE_BYTES = b"\0\0\x08\x03" + struct.pack(">3I", 2, 3, 4) + SAMPLE.tobytes()


def refusal(call, *arguments, **options) -> str:
    """Call and return the DataError's text, which has to be one line."""
    with pytest.raises(DataError) as caught:
        call(*arguments, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


@given(
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5))
    ),
    st.sampled_from(["values-idx", "values-idx.gz"]),
)
def test_what_was_written_comes_back(tmp_path_factory, array, name):
    path = tmp_path_factory.mktemp("idx") / name
    write_idx(path, array)
    got = read_idx(path)
    assert got.dtype == array.dtype and got.dtype.isnative and got.shape == array.shape
    assert got.tobytes() == array.tobytes()


def test_the_bytes_are_the_formats_own(tmp_path):
    write_idx(tmp_path / "plain", SAMPLE)
    assert (tmp_path / "plain").read_bytes() == SAMPLE_BYTES
    write_idx(tmp_path / "wide", np.array([1, -2], dtype=np.int32))
    assert (tmp_path / "wide").read_bytes().hex() == "00000c010000000200000001fffffffe"
    write_idx(tmp_path / "zipped.gz", SAMPLE)
    assert gzip.decompress((tmp_path / "zipped.gz").read_bytes()) == SAMPLE_BYTES


def test_gzip_is_told_by_content_not_by_name(tmp_path):
    path = tmp_path / "images-idx3-ubyte"
    path.write_bytes(gzip.compress(SAMPLE_BYTES))
    np.testing.assert_array_equal(read_idx(path), SAMPLE)
    path = tmp_path / "images-idx3-ubyte.gz"
    path.write_bytes(SAMPLE_BYTES)
    np.testing.assert_array_equal(read_idx(path), SAMPLE)


@given(st.integers(0, len(SAMPLE_BYTES) - 1))
def test_a_plain_file_cut_anywhere_is_refused(tmp_path_factory, kept):
    path = tmp_path_factory.mktemp("idx") / "cut"
    path.write_bytes(SAMPLE_BYTES[:kept])
    text = refusal(read_idx, path)
    assert str(path) in text and "expected" in text and "got" in text


@given(st.integers(0, len(gzip.compress(SAMPLE_BYTES)) - 1))
def test_a_gzip_file_cut_anywhere_is_refused(tmp_path_factory, kept):
    path = tmp_path_factory.mktemp("idx") / "cut.gz"
    path.write_bytes(gzip.compress(SAMPLE_BYTES)[:kept])
    text = refusal(read_idx, path)
    assert str(path) in text and "expected" in text


@given(st.integers(0, len(gzip.compress(SAMPLE_BYTES, mtime=0)) - 1), st.integers(0, 7))
def test_a_flipped_bit_never_gives_wrong_values(tmp_path_factory, position, bit):
    content = bytearray(gzip.compress(SAMPLE_BYTES, mtime=0))
    content[position] ^= 1 << bit
    path = tmp_path_factory.mktemp("idx") / "flipped.gz"
    path.write_bytes(content)
    try:
        got = read_idx(path)
    except DataError:
        return
    np.testing.assert_array_equal(got, SAMPLE)  # the flip fell on a field that carries no data


def test_a_large_truncated_gzip_says_how_much_of_it_there_is(tmp_path):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    values = np.random.default_rng(0).integers(0, 256, (4000, 28, 28), dtype=np.uint8)
    write_idx(path, values)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    said = f"expected 3136016 bytes by its header, got a gzip file cut off after {len(whole) // 2} bytes"
    assert said in refusal(read_idx, path)


def test_trailing_bytes_are_refused(tmp_path):
    path = tmp_path / "long"
    path.write_bytes(SAMPLE_BYTES + b"x")
    assert "expected 40 bytes by its header, got more" in refusal(read_idx, path)
    path.write_bytes(gzip.compress(SAMPLE_BYTES + b"x"))
    assert "expected 40 bytes by its header, got more" in refusal(read_idx, path)


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04", b"\0\0\x07\x01\0\0\0\0", b"\0\0\x08\0", b"\x01\0\x08\x01", b"\0", b""]
)
def test_another_magic_is_refused(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    text = refusal(read_idx, path)
    assert "not an IDX file" in text and (content[:4].hex(" ") or "nothing") in text


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    assert "No such file" in refusal(read_idx, tmp_path / "absent")
    assert "Is a directory" in refusal(read_idx, tmp_path)


def test_expected_shape_and_dtype(tmp_path):
    path = tmp_path / "values"
    write_idx(path, SAMPLE)
    assert read_idx(path, shape=(None, 3, 4), dtype="uint8").shape == (2, 3, 4)
    assert "expected dimensions any, got 2 x 3 x 4" in refusal(read_idx, path, shape=(None,))
    assert "expected dimensions any x 28 x 28, got" in refusal(read_idx, path, shape=(None, 28, 28))
    assert "expected float32 values, got uint8" in refusal(read_idx, path, dtype="float32")


@pytest.mark.parametrize("zipped", [False, True])
def test_nothing_is_allocated_for_a_header_that_states_too_much(tmp_path, monkeypatch, zipped):
    path = tmp_path / "huge"
    content = b"\0\0\x08\x03" + struct.pack(">3I", 60_000, 1 << 8, 1 << 8) + bytes(100)
    path.write_bytes(gzip.compress(content) if zipped else content)
    monkeypatch.setattr(np, "empty", lambda *_: pytest.fail("memory was taken before the size was checked"))
    assert "expected 3932160016 bytes by its header" in refusal(read_idx, path)
    content = b"\0\0\x0e\x04" + struct.pack(">4I", *[0xFFFFFFFF] * 4)
    path.write_bytes(gzip.compress(content) if zipped else content)
    assert "its header states more values than any memory holds, expected at most 4.0 GiB" in refusal(read_idx, path)
    content = b"\0\0\x08\x02" + struct.pack(">2I", 5 << 10, 1 << 20)
    path.write_bytes(gzip.compress(content) if zipped else content)
    assert "its header states 5.0 GiB of values, expected at most 4.0 GiB" in refusal(read_idx, path)


def test_what_idx_cannot_hold_is_refused(tmp_path):
    for array in (np.zeros(3, np.uint16), np.zeros((), np.uint8), np.array(["text"])):
        assert "dimensions of uint8, int8" in refusal(write_idx, tmp_path / "values", array)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "values"
    path.write_bytes(b"old")

    def full_disk(_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="disk full"):
        write_idx(path, SAMPLE)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
