"""IDX files, MNIST's format, plain or gzipped: read strictly, written atomically.

Layout: two zero bytes, a type code, the number of dimensions, each dimension as a big-endian uint32, then
the values, big-endian, last dimension fastest.
Source: http://yann.lecun.com/exdb/mnist/ ("the IDX file format").
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from clcomm.base.errors import DataError
from clcomm.base.host.arrays import aligned_empty
from clcomm.base.storage.files import replacing
from clcomm.base.units import format_size

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_CODES = {np.dtype(text).newbyteorder("="): code for code, text in _TYPES.items()}
_GZIP_MAGIC = b"\x1f\x8b"
_DEFLATE_MAX_RATIO = 1032  # no deflate stream grows by more (zlib's technical details page)
_CHUNK = 1 << 20
_MOST_DIMENSIONS = 32  # the most that every NumPy release supports
MAX_BYTES = 4 << 30

Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]
FilePath = str | os.PathLike[str]


def read_idx(
    path: FilePath,
    *,
    shape: Sequence[int | None] | None = None,
    dtype: str | None = None,
    max_bytes: int = MAX_BYTES,
    allocate: Allocate = aligned_empty,
) -> np.ndarray:
    """Return the array of an IDX file, in the machine's byte order.

    Args:
        path: the file, plain or gzipped.
        shape: the dimensions that the file must have, None for any length; None: any dimensions.
        dtype: the type that the values must have; None: any.
        max_bytes: the largest size of the values.
        allocate: returns the memory for the values, by shape and type.

    Raises DataError unless magic, dimensions and length are all exactly right; nothing is allocated for a file that is
    too short for its own header or larger than `max_bytes`.
    """
    with _reading(path) as stream:
        found, dimensions = _header(path, stream)
        _check_expected(path, found, dimensions, shape, dtype)
        _check_size(path, dimensions, found.itemsize, max_bytes)
        array = allocate(tuple(dimensions), found)  # a device can read it in place
        _fill(path, stream, array)
    return array if array.dtype.isnative else array.astype(found.newbyteorder("="))


def write_idx(path: FilePath, array: np.ndarray) -> None:
    """Write `array` as an IDX file, gzipped if the name ends in .gz; a failed write leaves the old file as it was.

    The same array gives the same bytes. Raises DataError if IDX has no code for the dtype or the shape.
    """
    path = Path(path)
    code = _CODES.get(array.dtype.newbyteorder("="))
    if code is None or not 1 <= array.ndim <= _MOST_DIMENSIONS or max(array.shape) >= 1 << 32:
        known = ", ".join(str(dtype) for dtype in _CODES)
        raise DataError(
            f"{path}: expected 1 to {_MOST_DIMENSIONS} dimensions of {known}, got {array.dtype} {array.shape}"
        )
    header = struct.pack(f">2xBB{array.ndim}I", code, array.ndim, *array.shape)
    content = header + array.astype(_TYPES[code]).tobytes()
    with replacing(path) as file:
        file.write(gzip.compress(content, 6, mtime=0) if path.suffix == ".gz" else content)


@contextmanager
def _reading(path: FilePath) -> Iterator[BinaryIO]:
    """Open a file, gzipped or plain by its content; raise DataError for errors in reading it."""
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            if not zipped:
                yield raw
                return
            with gzip.GzipFile(fileobj=raw) as stream:
                yield cast(BinaryIO, stream)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: damaged gzip file ({error}); expected a whole one, copy or download it again"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); check the path and rights") from error


def _header(path: FilePath, stream: BinaryIO) -> tuple[np.dtype, tuple[int, ...]]:
    magic = stream.read(4)
    code = magic[2] if len(magic) == 4 else None
    if len(magic) < 4 or magic[:2] != b"\0\0" or code not in _TYPES or not 1 <= magic[3] <= _MOST_DIMENSIONS:
        raise DataError(
            f"{path}: not an IDX file: expected 00 00, a type code (08 to 0e) and the number of dimensions (01 to 20) "
            f"at its start, got {magic.hex(' ') or 'nothing'}; give a file such as train-images-idx3-ubyte.gz"
        )
    packed = stream.read(4 * magic[3])
    if len(packed) < 4 * magic[3]:
        raise DataError(
            f"{path}: truncated IDX file: expected {magic[3]} dimensions in {4 * magic[3]} bytes, got "
            f"{len(packed)}; copy or download it again"
        )
    return np.dtype(_TYPES[code]), struct.unpack(f">{magic[3]}I", packed)


def _header_bytes(dimensions: tuple[int, ...]) -> int:
    return 4 + 4 * len(dimensions)


def _check_expected(
    path: FilePath,
    found: np.dtype,
    dimensions: tuple[int, ...],
    shape: Sequence[int | None] | None,
    dtype: str | None,
) -> None:
    if dtype is not None and found.newbyteorder("=") != np.dtype(dtype):
        raise DataError(
            f"{path}: expected {np.dtype(dtype)} values, got {found.newbyteorder('=')}; is it the right file?"
        )
    if shape is None:
        return
    fits = len(shape) == len(dimensions) and all(
        want is None or want == got for want, got in zip(shape, dimensions, strict=True)
    )
    if not fits:
        wanted = " x ".join("any" if want is None else str(want) for want in shape)
        got = " x ".join(map(str, dimensions))
        raise DataError(f"{path}: expected dimensions {wanted}, got {got}; is it the right file?")


def _check_size(path: FilePath, dimensions: tuple[int, ...], itemsize: int, max_bytes: int) -> None:
    """Raise DataError where the header's size exceeds the file's, before memory is allocated for it."""
    header, nbytes = _header_bytes(dimensions), math.prod(dimensions) * itemsize
    # An empty dimension counts as 1, as in NumPy's own limit of an array's size.
    if math.prod(max(length, 1) for length in dimensions) * itemsize > max_bytes:
        raise DataError(
            f"{path}: its header states {_stated(nbytes)}, expected at most {format_size(max_bytes)}; "
            f"the file is damaged or needs splitting"
        )
    with open(path, "rb") as raw:
        zipped = raw.read(2) == _GZIP_MAGIC
        on_disk = os.fstat(raw.fileno()).st_size
    possible = on_disk * _DEFLATE_MAX_RATIO if zipped else on_disk
    if header + nbytes > possible:
        raise DataError(_wrong_length(path, header + nbytes, f"{on_disk} bytes{' of gzip' if zipped else ''}"))


def _stated(nbytes: int) -> str:
    return f"{format_size(nbytes)} of values" if nbytes < 1 << 80 else "more values than any memory holds"


def _fill(path: FilePath, stream: BinaryIO, array: np.ndarray) -> None:
    """Read exactly array.nbytes bytes into `array`; DataError where the file has fewer or more."""
    header = _header_bytes(array.shape)
    target = memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    got = 0
    try:
        while got < len(target):
            count = stream.readinto(target[got : got + _CHUNK])  # type: ignore[attr-defined]
            if not count:
                break
            got += count
        rest = stream.read(1)  # at the end of the data gzip also checks its sum and length
    except EOFError as error:
        got_text = f"a gzip file cut off after {os.path.getsize(path)} bytes"
        raise DataError(_wrong_length(path, header + len(target), got_text)) from error
    if got < len(target) or rest:
        got_text = "more" if rest else f"{header + got} bytes"
        raise DataError(_wrong_length(path, header + len(target), got_text))


def _wrong_length(path: FilePath, expected: int, got: str) -> str:
    kind = "overlong" if got == "more" else "truncated"
    expected_text = f"expected {expected} bytes by its header"
    return f"{path}: {kind} IDX file: {expected_text}, got {got}; copy or download it again"
