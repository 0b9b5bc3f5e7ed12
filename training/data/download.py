"""Download a dataset's four files into a directory: several mirrors, short time-outs, checksums."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from clcomm.base.errors import DataError
from clcomm.base.units import format_size
from training.data.datasets import MNIST_FILES

CONNECT_LIMIT_S = 5.0  # until the first byte, shared by all mirrors
STALL_LIMIT_S = 15.0  # between two chunks of a file
MAX_FILE_BYTES = 64 << 20
_MAX_CONTENT_BYTES = 256 << 20


@dataclass(frozen=True)
class Remote:
    """Where a dataset is published; `md5` by file is that of the uncompressed content or of the .gz file."""

    name: str
    mirrors: tuple[str, ...]
    md5: dict[str, str] = field(hash=False)


MNIST = Remote(
    "mnist",
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    dict(
        zip(
            MNIST_FILES,
            (
                "6bbc9ace898e44ae57da46a324031adb",
                "a25bea736e30d166cdddb491f175f624",
                "2646ac647ad5339dbf082846283269ea",
                "27ae3e4e09519cfbb04c329615203637",
            ),
            strict=True,
        )
    ),
)
FASHION_MNIST = Remote(
    "fashion-mnist",
    (
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    dict(
        zip(
            MNIST_FILES,
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
            strict=True,
        )
    ),
)


def download(
    remote: Remote,
    target: Path,
    *,
    connect_limit_s: float = CONNECT_LIMIT_S,
    report: Callable[[str], object] = lambda line: None,
) -> None:
    """Put the four .gz files of `remote` into `target`, where they appear after all of them are checked.

    Args:
        remote: the dataset and its mirrors, which are tried in order.
        target: the directory; it is created.
        connect_limit_s: seconds for the first answers of all mirrors together.
        report: receives a line when a mirror serves the set.

    Raises DataError, with each mirror's failure, if none of them serves the set.
    """
    failures = []
    deadline = time.monotonic() + connect_limit_s
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=".download-", ignore_cleanup_errors=True) as work:
            for index, mirror in enumerate(remote.mirrors):
                wait_s = max(0.2, (deadline - time.monotonic()) / (len(remote.mirrors) - index))
                try:
                    _fetch_all(remote, mirror, Path(work), wait_s, report)
                except FetchError as error:
                    failures.append(f"{urlsplit(mirror).netloc}: {error}")
                    continue
                for name in remote.md5:
                    os.replace(Path(work, name + ".gz"), target / (name + ".gz"))
                return
    except OSError as error:
        raise DataError(
            f"{target}: cannot keep downloaded data there ({error.strerror or error}); set CLCOMM_DATA instead"
        ) from error
    raise DataError(f"{remote.name}: download failed ({'; '.join(failures)})")


class FetchError(Exception):
    """The failure of one mirror, in a few words."""


def _fetch_all(remote: Remote, mirror: str, work: Path, wait_s: float, report: Callable[[str], object]) -> None:
    # The test labels come first: the smallest file shows first whether a mirror serves the set.
    for position, name in enumerate(reversed(remote.md5)):
        fetch(mirror + name + ".gz", work / (name + ".gz"), wait_s, MAX_FILE_BYTES)
        content = (work / (name + ".gz")).read_bytes()
        if not matches(content, remote.md5[name]):
            raise FetchError(f"{name}.gz has another checksum than {remote.md5[name]}")
        if position == 0:
            report(f"data: downloading {remote.name} from {urlsplit(mirror).netloc} to {work.parent}")


def matches(content: bytes, md5: str) -> bool:
    """Return whether `md5` is the checksum of `content` or of its gunzipped content."""
    if hashlib.md5(content, usedforsecurity=False).hexdigest() == md5:
        return True
    unzip = zlib.decompressobj(wbits=31)
    try:
        plain = unzip.decompress(content, _MAX_CONTENT_BYTES)
    except zlib.error:
        return False
    # A file that is cut off within its last 8 bytes still unzips to the whole content, but readers refuse it.
    if not unzip.eof or unzip.unused_data:
        return False
    return hashlib.md5(plain, usedforsecurity=False).hexdigest() == md5


def fetch(url: str, path: Path, wait_s: float, most_bytes: int, answered: Callable[[], object] = lambda: None) -> None:
    """Download one file in its own thread, because a name look-up can block longer than any time-out.

    Args:
        wait_s: seconds until the first byte.
        most_bytes: the largest size of the file.
        answered: called when the first bytes are here.

    Raises FetchError where that fails, DataError without Pooch.
    """
    if find_spec("pooch") is None:
        raise DataError("Pooch, which downloads data, is not installed; pip install pooch")
    transfer = _Transfer(url, path, wait_s, most_bytes)
    thread = threading.Thread(target=transfer.run, name="clcomm-download", daemon=True)
    thread.start()
    try:
        if not transfer.answered.wait(wait_s):
            raise FetchError(f"no answer within {wait_s:.1f} s")
        if transfer.failure is None:
            answered()
        transfer.finished.wait()
    finally:
        transfer.cancelled = True
    if transfer.failure is not None:
        raise FetchError(transfer.failure)


class _Transfer:
    """The download of one file; it has the interface of a progress bar, so that pooch calls it for every chunk."""

    def __init__(self, url: str, path: Path, wait_s: float, most_bytes: int) -> None:
        self.url, self.path, self.wait_s, self.most_bytes = url, path, wait_s, most_bytes
        self.total = 0
        self.received = 0
        self.cancelled = False
        self.failure: str | None = None
        self.answered = threading.Event()
        self.finished = threading.Event()

    def run(self) -> None:
        import pooch

        logger = pooch.get_logger()
        level = logger.level
        logger.setLevel("WARNING")
        try:
            downloader = pooch.HTTPDownloader(
                progressbar=self, chunk_size=1 << 16, timeout=(self.wait_s, STALL_LIMIT_S)
            )
            pooch.retrieve(
                self.url, known_hash=None, fname=self.path.name, path=self.path.parent, downloader=downloader
            )
        except Exception as error:  # after any error the next mirror is tried
            self.failure = _reason(error)
        finally:
            logger.setLevel(level)
            self.finished.set()
            self.answered.set()

    def update(self, nbytes: int) -> None:
        self.answered.set()
        self.received += nbytes
        if self.cancelled:
            raise FetchError("given up")
        if max(self.received, self.total) > self.most_bytes:
            raise FetchError(f"more than {format_size(self.most_bytes)}")

    def reset(self) -> None:
        self.received = 0

    def close(self) -> None:
        """Do nothing: pooch closes its progress bar."""


def _reason(error: Exception) -> str:
    """Return an error of requests in a few words instead of several lines."""
    kind = type(error).__name__
    response = getattr(error, "response", None)
    if response is not None:
        return f"HTTP {response.status_code}"
    if isinstance(error, FetchError):
        return str(error)
    return {
        "ConnectTimeout": "no connection in time",
        "ReadTimeout": "stalled",
        "ConnectionError": "no connection",
        "SSLError": "its certificate is not trusted",
        "ProxyError": "the proxy refused",
    }.get(kind, kind)
