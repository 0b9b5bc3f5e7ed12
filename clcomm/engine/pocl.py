"""Programs of PoCL's cache, each with a seal: what differs from it is built anew, elsewhere.

PoCL loads the files of its cache unchecked, and crashes on damaged ones. So each program has a kernel with a name of
its own, drawn when it is first built, which is in the seal, a file beside PoCL's folders, with the digests of the
program's files. A program without a seal, or with other files than in it, gets another name: PoCL takes it for one that
it has not seen, so nothing is removed from under other processes.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import platform
import re
import secrets
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import cache
from hashlib import blake2b, sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clcomm.base.errors import DeviceError
from clcomm.base.host.rank_process import start_time
from clcomm.base.storage.files import open_regular, read_regular
from clcomm.base.storage.private import first_private, unfit, user_cache

if TYPE_CHECKING:
    import pyopencl as cl

_MOST_BYTES = 1 << 20
#: PoCL touches this file of a program's folder at each use. File times may be a clock tick, a few milliseconds, too
#: early, for which _TICK_S is ample.
_TOUCHED, _TICK_S = "last_accessed", 1.0
_PIECE_BYTES = 1 << 20
#: Variables of PoCL's that change no code.
_OTHERS = ("POCL_CACHE_DIR", "POCL_MAX_PTHREAD_COUNT", "POCL_CPU_MAX_CU_COUNT")
#: Seconds after which new programs are sealed as another one is built.
_SEALS_S = 2.0
#: For how long after its start a process on another host is taken to build, in seconds.
_ELSEWHERE_S = 600.0
#: The kernel that names a program, in its code.
_NAME = re.compile(rb"clcomm_([0-9a-f]{16})")
#: The programs that this process uses.
_used: dict[Path, SealedProgram] = {}
_sealed_s = 0.0


def sealed(cl_device: cl.Device, source: str, options: list[str]) -> SealedProgram | None:
    """Return a program's place; None where PoCL has no cache. It is sealed at the process's end, at the latest."""
    cache = os.environ.get("POCL_CACHE_DIR")
    if not cache or os.environ.get("POCL_KERNEL_CACHE", "1") == "0" or "Portable" not in cl_device.platform.name:
        return None
    if time.monotonic() - _sealed_s > _SEALS_S:
        seal_all()
    given = sorted(item for item in os.environ.items() if item[0].startswith("POCL_") and item[0] not in _OTHERS)
    facts = [cl_device.platform.version, cl_device.name, cl_device.driver_version, repr(given), *options, source]
    place = Path(cache) / f"seal-{sha256(repr(facts).encode()).hexdigest()[:32]}"
    if place not in _used:
        if not _used:
            atexit.register(seal_all)
        _used[place] = SealedProgram(place)
    return _used[place]


def seal_all() -> None:
    """Seal the files of all programs that this process uses."""
    global _sealed_s
    new = [program for program in [*_used.values()] if not program.folder]
    folders: dict[str, str] = {}
    if new:
        cache, since_s = new[0].place.parent, min(program.began_s for program in new)
        for folder in _used_since(cache, since_s):
            with suppress(OSError):  # removed meanwhile
                for name in _NAME.findall((folder / "program.bc").read_bytes()):
                    folders[name.decode()] = str(folder.relative_to(cache))
    for program in [*_used.values()]:  # another thread may build
        program.seal(folders)
    _sealed_s = time.monotonic()


class SealedProgram:
    """One program's place in the cache.

    Attributes:
        place: its seal.
        folder: PoCL's, below the cache; "": it is not known yet.
        began_s: when this process began to use it, in seconds of the epoch.
        line: to be added to its source.
    """

    def __init__(self, place: Path):
        self.place, self.began_s = place, time.time()
        found = _read(place)
        is_alive = found is not None and _is_alive(place, found["by"])
        if found is None or not (_is_whole(place, found, not is_alive) if found["folder"] else is_alive):
            found = {"name": secrets.token_hex(8), "folder": "", "files": {}, "by": _own()}
            self._write(found)
        elif not is_alive:
            self._write({**found, "by": _own()})  # what PoCL adds is known until this process has sealed it
        self._name: str = found["name"]
        self.folder: str = found["folder"]
        self.line = f"\n__kernel void clcomm_{self._name}(void) {{}}\n"

    def seal(self, folders: Mapping[str, str]) -> None:
        """Add files that are not sealed yet, which living processes have built; folders: of new programs, by name."""
        found = _read(self.place)
        if found is None or found["name"] != self._name:
            return  # another process has found it damaged
        self.folder = found["folder"] or folders.get(self._name, "")
        files = {**(digests_of(self.place.parent / self.folder) if self.folder else {}), **found["files"]}
        if files.keys() != found["files"].keys():
            self._write({**found, "folder": self.folder, "files": files})

    def _write(self, found: dict[str, Any]) -> None:
        partial = self.place.with_name(f".{self.place.name}.{os.getpid()}")
        with suppress(OSError):
            text = json.dumps(found)
            partial.write_text(f"{_digest(text)}\n{text}")
            if self.place.is_dir():
                self.place.rmdir()
            os.replace(partial, self.place)


def names_used(cache: Path) -> list[str]:
    """Return the names of the seals of a cache's programs that this process uses."""
    return [place.name for place in _used if place.parent == cache]


def damaged(cache: Path, names: Iterable[str] | None = None) -> list[Path]:
    """Return the seals, and the folders of programs, that are missing or differ; names: of some seals, None: all."""
    found = []
    for place in sorted(cache.glob("seal-*") if names is None else (cache / name for name in names)):
        seal = _read(place)
        if seal is None:
            found.append(place)
        elif seal["folder"] and not _is_whole(place, seal, is_complete=False):
            found.append(cache / seal["folder"])
    return found


def _is_whole(place: Path, found: Mapping[str, Any], is_complete: bool) -> bool:
    """Return whether a program's files are those of its seal; is_complete: and it has no others."""
    files = digests_of(place.parent / found["folder"])
    is_same = all(files.get(name) == tuple(digest) for name, digest in found["files"].items())
    return is_same and (not is_complete or files.keys() == found["files"].keys())


def _used_since(cache: Path, since: float) -> list[Path]:
    """Return the folders of programs used since a time (seconds of the epoch) or shortly before it; none is a link."""
    folders = [path.parent for path in cache.glob(f"*/*/{_TOUCHED}") if path.lstat().st_mtime >= since - _TICK_S]
    return [folder for folder in folders if not folder.is_symlink() and not folder.parent.is_symlink()]


def digests_of(folder: Path) -> dict[str, tuple[int, str]]:
    """Return length and digest of each file of a program's folder, by relative name."""
    found: dict[str, tuple[int, str]] = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            path = Path(directory, name)
            if name != _TOUCHED:
                with suppress(OSError):  # deleted meanwhile, or unreadable for PoCL too
                    found[str(path.relative_to(folder))] = _digest_of(path)
    return found


def _digest_of(path: Path) -> tuple[int, str]:
    digest, length = blake2b(digest_size=16), 0
    with open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            length += len(piece)
    return length, digest.hexdigest()


def _read(place: Path) -> dict[str, Any] | None:
    """Return a seal; None where it is missing or damaged."""
    with suppress(OSError, ValueError):
        digest, _, text = read_regular(place, _MOST_BYTES).decode().partition("\n")
        if digest == _digest(text):
            return dict(json.loads(text))
    return None


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _own() -> tuple[str, int, int]:
    return os.uname().nodename, os.getpid(), start_time(os.getpid())


def _is_alive(place: Path, by: tuple[str, int, int]) -> bool:
    """Return whether the process that builds lives; one on another host is taken for alive for a while."""
    host, pid, began = by
    if host == os.uname().nodename:
        return began > 0 and start_time(pid) == began
    with suppress(OSError):
        return time.time() - place.stat().st_mtime < _ELSEWHERE_S
    return False


# --- A private directory for PoCL's built kernels, as PoCL runs the code in it. ---
# PoCL's own default for a process without HOME is /tmp/pocl/kcache, even if another user created that.

#: The least that building a kernel needs: open descriptors, and bytes of object and intermediate code.
_DESCRIPTORS, _KERNEL_BYTES = 16, 1 << 20


def prepare() -> None:
    """Set POCL_CACHE_DIR, before PoCL is loaded, to a directory that no other user can write to.

    Raises DeviceError if the user set it to a directory that others can write to, or that cannot be created, and
    ArgumentError if there is no possible directory.
    """
    given = os.environ.get("POCL_CACHE_DIR")
    if given:
        os.environ["POCL_CACHE_DIR"] = _checked(given)
    else:
        os.environ["POCL_CACHE_DIR"] = str(_own_directory())


def shortage() -> str:
    """Return why PoCL cannot store a kernel (disk space, descriptors, permission), or "" if it can."""
    directory = os.environ.get("POCL_CACHE_DIR")
    try:
        with ExitStack() as stack:
            for _ in range(_DESCRIPTORS):
                stack.enter_context(open(os.devnull, "rb"))
            if directory:
                with tempfile.TemporaryFile(dir=directory) as file:
                    file.write(bytes(_KERNEL_BYTES))
                    file.flush()
    except OSError as error:
        return f"kernel cache {directory}: {error.strerror}"
    return ""


def _checked(given: str) -> str:
    """Return the directory with links resolved, as others could change a link."""
    directory = Path(os.path.realpath(given))
    problem = unfit(directory, chosen=True)
    if problem:
        raise DeviceError(
            f"POCL_CACHE_DIR: expected a directory that only this user can write to, as PoCL runs the code in it; got "
            f"{given!r}: {problem}"
        )
    return str(directory)


def _own_directory() -> Path:
    """Return the first private directory of PoCL's default, one of clcomm's, and a temporary one."""
    cache = Path(os.path.realpath(user_cache()))
    return first_private((cache / "pocl" / "kcache", cache / "clcomm" / "pocl"), "pocl")


# --- The target processor of PoCL 3 on processors newer than its LLVM. ---
# PyPI's PoCL has LLVM 14, which knows no AMD processor of family 1Ah (Zen 5) or later. There it passes the target
# "generic" to clang, which rejects it for x86, so that no kernel builds. `name_processor` then sets the nearest
# processor that this LLVM knows.

#: The affected build, and the byte offset of `char *llvm_cpu` in its `struct _cl_device_id`.
_DRIVER, _LLVM, _LLVM_CPU = "3.0-rc2", "LLVM 14.0.6", 640
_UNKNOWN = b"generic"
#: Processors of LLVM 14, the best first, with the features that its code for them may use (names of /proc/cpuinfo).
_HASWELL = frozenset(("avx2", "bmi1", "bmi2", "fma", "f16c", "abm", "movbe"))
PROCESSORS: tuple[tuple[str, frozenset[str]], ...] = (
    ("znver3", _HASWELL | {"adx", "sha_ni", "sse4a", "vaes", "vpclmulqdq"}),
    ("skylake-avx512", _HASWELL | {"adx", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("haswell", _HASWELL),
    ("x86-64", frozenset()),
)


def nearest_processor(features: Iterable[str]) -> str:
    """Return LLVM 14's name for the best processor that has no feature beyond these."""
    available = frozenset(features)
    return next(name for name, needed in PROCESSORS if needed <= available)


def name_processor(cl_device: cl.Device) -> bool:
    """Set the nearest processor that PoCL 3 knows, if it does not know this one; return whether it was set.

    Devices of other drivers, and those with a processor's name, are left unchanged. For a part of a device PoCL asks
    the whole one.
    """
    whole = cl_device.parent_device
    if whole is not None:
        name_processor(whole)
    if not _is_unnamed(cl_device):
        return False
    field = ctypes.c_void_p.from_address(cl_device.int_ptr + _LLVM_CPU)
    if field.value is None or ctypes.string_at(field.value, len(_UNKNOWN) + 1) != _UNKNOWN + b"\0":
        return False
    duplicate = ctypes.CDLL(None).strdup  # in C's heap, as PoCL may free it
    duplicate.restype, duplicate.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    field.value = duplicate(nearest_processor(processor_features()).encode())
    return True


def _is_unnamed(cl_device: cl.Device) -> bool:
    """Return whether this is the wheel's build on a processor that it has no name for."""
    return bool(
        cl_device.driver_version == _DRIVER
        and platform.machine() == "x86_64"
        and cl_device.version.endswith(f"-{_UNKNOWN.decode()}")
        and _LLVM in cl_device.platform.version
        and find_spec("pocl_binary_distribution")
    )


@cache
def processor_features() -> list[str]:
    """Return the features of this machine's processor, as Linux names them; none if it lists none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    return next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
