"""Downloads: several mirrors, checksums, time limits, and nothing half-done left behind."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import os
import socket
import sys
import threading
from functools import partial

import pytest

from clcomm.base.errors import DataError
from training.data import download as module
from training.data.cifar import download_cifar10
from training.data.datasets import MNIST_FILES, find_mnist_files
from training.data.download import FASHION_MNIST, MNIST, Remote, download, matches


class Mirror:
    """A web server on this machine that serves `files`; `stall_s` keeps it silent, `garble` cuts what it sends."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.asked: list[str] = []
        self.stop_stalling = threading.Event()
        self.stalled = False
        mirror = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked.append(self.path)
                if mirror.stalled:
                    mirror.stop_stalling.wait(30)
                content = mirror.files.get(self.path.rsplit("/", 1)[-1])
                self.send_response(404 if content is None else 200)
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, format: str, *values: object) -> None:
                """Keep the test's output clean."""

            def handle(self) -> None:
                try:
                    super().handle()
                except OSError:
                    """The client gave up, as some tests want it to."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/set/"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.stop_stalling.set()
        self.server.shutdown()
        self.server.server_close()


CONTENT = {name: f"content of {name}".encode() * 1000 for name in MNIST_FILES}
FILES = {name + ".gz": gzip.compress(content) for name, content in CONTENT.items()}
SUMS = {name: hashlib.md5(content).hexdigest() for name, content in CONTENT.items()}


@pytest.fixture
def mirrors(monkeypatch):
    """Make mirrors on this machine; no proxy of the surroundings stands in between."""
    monkeypatch.setenv("no_proxy", "*")
    made: list[Mirror] = []

    def make(files=FILES):
        made.append(Mirror(dict(files)))
        return made[-1]

    yield make
    for mirror in made:
        mirror.close()


def closed_port_url():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/"


def failure(*arguments, **options):
    with pytest.raises(DataError) as caught:
        download(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_arrive_checked_and_alone(mirrors, tmp_path):
    lines: list[str] = []
    mirror = mirrors()
    download(Remote("set", (mirror.url,), SUMS), tmp_path / "new" / "set", report=lines.append)
    assert {path.name: path.read_bytes() for path in (tmp_path / "new" / "set").iterdir()} == FILES
    assert len(mirror.asked) == 4 and len(lines) == 1 and "downloading set from 127.0.0.1" in lines[0]


def test_a_published_sum_of_the_gz_file_counts_too(mirrors, tmp_path):
    sums = {name: hashlib.md5(FILES[name + ".gz"]).hexdigest() for name in MNIST_FILES}
    download(Remote("set", (mirrors().url,), sums), tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_the_next_mirror_is_tried(mirrors, tmp_path):
    lacking = mirrors({name: FILES[name] for name in list(FILES)[1:]})
    garbled = mirrors(FILES | {"t10k-labels-idx1-ubyte.gz": gzip.compress(b"something else")})
    good = mirrors()
    remote = Remote("set", (closed_port_url(), lacking.url, garbled.url, good.url), SUMS)
    download(remote, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == FILES
    assert len(garbled.asked) == 1  # the smallest file already gave it away


def test_a_wrong_checksum_keeps_nothing(mirrors, tmp_path):
    mirror = mirrors(FILES | {"train-images-idx3-ubyte.gz": gzip.compress(b"something else")})
    text = failure(Remote("set", (mirror.url,), SUMS), tmp_path)
    assert "train-images-idx3-ubyte.gz has another checksum than" in text
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_answer_is_no_set(mirrors, tmp_path):
    cut = {name: content[:-9] for name, content in FILES.items()}
    assert "another checksum" in failure(Remote("set", (mirrors(cut).url,), SUMS), tmp_path)


def test_nobody_there_fails_fast_and_names_each_mirror(mirrors, tmp_path):
    remote = Remote("set", (closed_port_url(), mirrors({}).url), SUMS)
    text = failure(remote, tmp_path)
    assert "no connection" in text and "HTTP 404" in text and "no answer" not in text  # no time limit was waited for
    assert list(tmp_path.iterdir()) == []


def test_silent_mirrors_share_the_time_limit(mirrors, tmp_path):
    silent = [mirrors(), mirrors(), mirrors()]
    for mirror in silent:
        mirror.stalled = True
    remote = Remote("set", tuple(mirror.url for mirror in silent), SUMS)
    text = failure(remote, tmp_path, connect_limit_s=0.9)
    assert text.count("no answer within 0.3 s") == 3


def test_a_hanging_name_look_up_is_not_waited_for(tmp_path, monkeypatch):
    release, is_over = threading.Event(), threading.Event()

    def hang(*_arguments, **_options):
        release.wait(60)
        is_over.set()
        raise OSError("released")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        text = failure(Remote("set", ("http://unheard.of.invalid/",), SUMS), tmp_path, connect_limit_s=0.3)
        assert not is_over.is_set() and "no answer" in text
    finally:
        release.set()
        for thread in threading.enumerate():
            if thread.name == "clcomm-download":
                thread.join(10)


def test_a_file_larger_than_any_dataset_is_cut_short(mirrors, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 1000)
    big = mirrors(FILES | {"t10k-labels-idx1-ubyte.gz": bytes(200_000)})
    assert "more than 1000 B" in failure(Remote("set", (big.url,), SUMS), tmp_path)


def test_without_pooch_a_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    for fetch in (partial(download, MNIST), download_cifar10):
        with pytest.raises(DataError, match=r"^Pooch, which downloads data, is not installed; pip install pooch$"):
            fetch(tmp_path)


def test_an_unwritable_directory_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    text = failure(Remote("set", (), SUMS), tmp_path / "file" / "set")
    assert str(tmp_path / "file" / "set") in text and "CLCOMM_DATA" in text


def test_sums_of_content_and_of_the_file():
    assert matches(b"abc", hashlib.md5(b"abc").hexdigest())
    assert matches(gzip.compress(b"abc"), hashlib.md5(b"abc").hexdigest())
    assert not matches(b"abd", hashlib.md5(b"abc").hexdigest())
    for cut in range(1, 23):
        assert not matches(gzip.compress(b"abc")[:-cut], hashlib.md5(b"abc").hexdigest())


def test_the_published_sets_are_complete():
    for remote in (MNIST, FASHION_MNIST):
        assert tuple(remote.md5) == MNIST_FILES and len(remote.mirrors) >= 2
        assert all(len(value) == 32 for value in remote.md5.values())


def test_real_mnist_passes_its_published_sums(mirrors, tmp_path):
    root = os.environ.get("CLCOMM_DATA")
    files = find_mnist_files(root) if root else {}
    if len(files) < 4 or any(path.suffix != ".gz" for path in files.values()):
        pytest.skip("CLCOMM_DATA names no directory with MNIST's .gz files")
    mirror = mirrors({name + ".gz": path.read_bytes() for name, path in files.items()})
    download(Remote("mnist", (mirror.url,), MNIST.md5), tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
