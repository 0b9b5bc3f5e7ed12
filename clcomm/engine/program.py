"""Programs from the `.cl` files: source, build options, typed kernels, and build errors."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from clcomm.base.errors import ClcommError, DeviceError, ShortageError
from clcomm.base.storage.files import read_regular, replacing
from clcomm.base.storage.private import cache_directory, first_private
from clcomm.engine import intel_runtime, memory, pocl
from clcomm.engine.pocl import processor_features

if TYPE_CHECKING:
    import pyopencl as cl

#: The global or local size of a launch: work-items in each dimension.
Size = tuple[int, ...]
_SCALARS = {
    "int": "int32", "uint": "uint32", "unsigned int": "uint32",
    "long": "int64", "ulong": "uint64", "unsigned long": "uint64",
    "float": "float32",
}  # fmt: skip
#: Files that several others include. Drivers get one text, so that their caches see it change.
_INCLUDE = re.compile(r'^#include "(\w+)\.cl"$', re.MULTILINE)
_LOG_LIMIT = 800  # characters of a build log in a message
#: Builds of one program at the same time in several processes may collide in PoCL's cache, so a failed one is repeated.
_TRIES = 2
#: PyOpenCL generates Python code as it makes a kernel, and Python keeps filters of warnings: neither is thread-safe.
_making = threading.Lock()


@cache
def source_of(file: str) -> str:
    """Return the text of `kernels/common.cl` and `kernels/<file>.cl`, with its includes.

    What follows a file's name from the next line on is a kernel of its functions, as `fusion` writes them.
    """
    name, _, kernel = file.partition("\n")
    return "\n".join([*map(_text_of, dict.fromkeys(["common", name])), kernel])


def all_sources() -> str:
    paths = sorted(Path(__file__).with_name("kernels").glob("*.cl"))
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


@cache
def _text_of(name: str) -> str:
    text = (Path(__file__).with_name("kernels") / f"{name}.cl").read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda found: _text_of(found[1]), text)


def build(context: cl.Context, file: str, options: list[str]) -> cl.Program:
    """Build `kernels/<file>.cl`; raises DeviceError with the options, the log, and where the source was saved."""
    import pyopencl as cl

    source, options = source_of(file), [*options, "-cl-mad-enable", "-cl-kernel-arg-info"]
    file, _, _ = file.partition("\n")
    stored = pocl.sealed(context.devices[0], source, options)
    source += "" if stored is None else stored.line
    skips_header = _can_skip_header(context.devices[0])
    for _ in range(_TRIES if skips_header else 0):
        with contextlib.suppress(cl.Error):
            quickly: cl.Program = cl.Program(context, _text_of("builtins") + source).build([*options, "-D_OPENCL_H_"])
            return quickly
    try:
        if serves(context.devices[0]):
            return _built_once(context, source, options)
        program: cl.Program = cl.Program(context, source).build(options)
    except cl.Error as error:
        raise _build_failure(file, options, source, str(error)) from None
    if skips_header:
        warnings.warn(f"kernels/{file}.cl: declare what it uses in kernels/builtins.cl, it builds faster", stacklevel=2)
    return program


def _built_once(context: cl.Context, source: str, options: list[str]) -> cl.Program:
    """Return a program from the cache, else build and store it; raises cl.Error."""
    import pyopencl as cl

    (cl_device,) = context.devices
    stored = CachedProgram(cl_device, source, options)
    with _making, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Intel's compiler says at each build that it has built
        types, _, binary = (stored.read() or b"").partition(b"\n")
        if binary:
            with contextlib.suppress(cl.Error):  # the driver takes it for another's
                program: cl.Program = cl.Program(context, [cl_device], [binary]).build(options)
                program.scalar_types = json.loads(types)  # type: ignore[attr-defined]
                return program
        program = cl.Program(context, source)
        # So PyOpenCL leaves its own cache out, whose programs have no names of types; it reads its variable only once.
        _ = program.int_ptr
        program.build(options)
        scalar_types = {name: _scalar_types(cl.Kernel(program, name)) for name in _kernels_of(program)}
        program.scalar_types = scalar_types  # type: ignore[attr-defined]
    binary = program.get_info(cl.program_info.BINARIES)[0]  # type: ignore[index]
    stored.write(json.dumps(scalar_types).encode() + b"\n" + binary)
    return program


def _kernels_of(program: cl.Program) -> list[str]:
    names: str = program.kernel_names
    return names.split(";")


def _can_skip_header(device: cl.Device) -> bool:
    """Return whether `builtins.cl` can replace the driver's header of built-in functions.

    PoCL 3 skips its header if the header's guard is defined: a cached program then loads in 8 ms instead of 25, a new
    one builds in a third of the time, and their machine code is the same.
    """
    return device.platform.version.startswith("OpenCL 3.0 PoCL 3.")


def _build_failure(file: str, options: list[str], source: str, log: str) -> DeviceError:
    lines = " | ".join(line.strip() for line in log.splitlines() if line.strip())
    shown = lines if len(lines) <= _LOG_LIMIT else lines[:_LOG_LIMIT] + "..."
    shortage = pocl.shortage()
    if shortage:
        return ShortageError(f"kernels/{file}.cl did not build, {shortage}: {shown}")
    saved = _save(file, f"{source}\n/* options: {' '.join(options)}\n{log.replace('*/', '* /')}\n*/\n")
    return DeviceError(f"kernels/{file}.cl did not build with options {' '.join(options)!r}: {shown} ({saved})")


def _save(file: str, text: str) -> str:
    """Save the source and log of a failed build; return a phrase with the path, for a message."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix=f"clcomm-{file}-", suffix=".cl", delete=False) as saved:
            saved.write(text)
        return f"source and log: {saved.name}"
    except OSError as error:
        return f"source and log could not be saved: {error.strerror}"


class Kernel(Protocol):
    """A kernel that takes Python numbers for its scalar arguments."""

    function_name: str

    def __call__(self, queue: cl.CommandQueue, *sizes_and_args: Any) -> cl.Event: ...


def typed_kernel(program: cl.Program, name: str) -> Kernel:
    """Return a kernel that takes Python numbers for its scalar arguments, the fastest way to set them."""
    import pyopencl as cl

    with _making:
        memory.share()
        kernel = cl.Kernel(program, name)
        known = getattr(program, "scalar_types", None)  # of a stored program: binaries have no argument information
        if known is not None:
            kernel.scalar_types = known[name]  # type: ignore[attr-defined]
        try:
            types = argument_types(kernel)
        except cl.Error:  # the driver has no argument information
            return _UntypedKernel(kernel)
        kernel.set_arg_types(types)
    return kernel  # type: ignore[return-value]  # has a function_name, which the stub leaves out


def argument_types(kernel: object) -> list[Any]:
    """Return the NumPy type of each scalar argument, None for buffers; raises cl.Error where the driver lacks them.

    `kernel` comes from `typed_kernel`.
    """
    import numpy as np

    known = getattr(kernel, "scalar_types", None)
    return [name and np.dtype(name).type for name in (_scalar_types(kernel) if known is None else known)]


def _scalar_types(kernel: Any) -> list[str | None]:
    """Return the name of the NumPy type of each scalar argument, None for buffers, as the driver has them."""
    import pyopencl as cl

    def name_of(index: int) -> str | None:
        private = cl.kernel_arg_address_qualifier.PRIVATE
        if kernel.get_arg_info(index, cl.kernel_arg_info.ADDRESS_QUALIFIER) != private:
            return None
        return _SCALARS[kernel.get_arg_info(index, cl.kernel_arg_info.TYPE_NAME)]

    return [name_of(index) for index in range(kernel.num_args)]


def bound_copy(kernel: Any, args: Sequence[Any], spare: list[cl.Kernel] | None = None) -> cl.Kernel:
    """Return another kernel object for the same kernel, with its arguments set.

    Args:
        args: the arguments; None leaves one unset.
        spare: unused objects of that kernel, one of which is taken.
    """
    import pyopencl as cl

    if isinstance(kernel, _UntypedKernel):
        kernel, args = kernel.kernel, [_as_argument(arg) for arg in args]
        types = [None] * len(args)
    else:
        types = argument_types(kernel)
    if spare:
        copy = spare.pop()
    else:
        with _making:
            copy = cl.Kernel(kernel.program, kernel.function_name)
    for index, (arg, kind) in enumerate(zip(args, types, strict=True)):
        if arg is not None:
            copy.set_arg(index, arg if kind is None else kind(arg))
    return copy


class _UntypedKernel:
    """A kernel of a driver without argument types: Python's ints are passed as int32, floats as float32.

    All kernels of this package declare them so.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.function_name = kernel.function_name

    def __call__(self, queue: cl.CommandQueue, *sizes_and_args: object) -> cl.Event:
        event: cl.Event = self.kernel(queue, *map(_as_argument, sizes_and_args))
        return event


def _as_argument(arg: object) -> object:
    import numpy as np

    return np.int32(arg) if type(arg) is int else np.float32(arg) if type(arg) is float else arg


# --- A private cache of built programs (OpenCL binaries), for drivers without a cache of their own. ---
# A binary has its digest before it; one that is damaged is built again.

_MOST_BYTES = 1 << 26  # of a file
_DIGEST_BYTES = 32
#: The starts of the names of features for which compilers make other code.
_CODE_FEATURES = ("adx", "aes", "amx", "avx", "bmi", "f16c", "fma", "popcnt", "sha", "sse", "ssse", "vaes")
#: Variables of the driver and of PyOpenCL that change code start so.
_VARIABLES = ("CL_CONFIG_", "PYOPENCL_BUILD_OPTIONS")


def serves(cl_device: cl.Device) -> bool:
    """Return whether this cache holds a device's programs: Intel's runtime has no cache of its own."""
    return intel_runtime.is_intel(cl_device)


def directory() -> Path | None:
    """Return the directory of programs; None where no directory is this user's alone."""
    with suppress(ClcommError, OSError):
        return _directory_in(Path(os.path.realpath(cache_directory())))
    return None


@cache
def _directory_in(caches: Path) -> Path:
    return first_private([caches / "programs"], "programs")


class CachedProgram:
    """A program's place in the cache, keyed by all inputs of its build."""

    def __init__(self, cl_device: cl.Device, source: str, options: list[str]):
        self._folder: Path | None = None
        found = directory()
        if found is not None:
            key = sha256("\0".join([*_identity(cl_device), source, *options]).encode()).hexdigest()[:40]
            self._folder = found / key[:2] / key[2:]

    def read(self) -> bytes | None:
        """Return the stored binary; None if there is none, or if it is damaged."""
        if self._folder is None:
            return None
        with suppress(OSError):
            content = read_regular(self._folder / "program", _MOST_BYTES)
            digest, binary = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if binary and _digest(binary) == digest:
                return binary
        return None

    def write(self, binary: bytes) -> None:
        """Store a binary atomically; nothing is stored on a full disk."""
        if self._folder is None or not binary:
            return
        with suppress(OSError), replacing(self._folder / "program") as file:
            file.write(_digest(binary) + binary)


def damaged() -> list[Path]:
    """Return the folders of programs whose binary differs from the stored one."""
    found = directory()
    return [] if found is None else [path.parent for path in sorted(found.glob("*/*/program")) if not _is_whole(path)]


def _is_whole(path: Path) -> bool:
    with suppress(OSError):
        content = read_regular(path, _MOST_BYTES)
        return _digest(content[_DIGEST_BYTES:]) == content[:_DIGEST_BYTES]
    return False


def _digest(binary: bytes) -> bytes:
    return blake2b(binary, digest_size=_DIGEST_BYTES).digest()


def _identity(cl_device: cl.Device) -> list[str]:
    """Return the inputs of the build besides source and options: driver, processor, and the driver's variables."""
    platform = cl_device.platform
    set_here = sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES))
    features = sorted(each for each in processor_features() if each.startswith(_CODE_FEATURES))
    return [
        platform.name, platform.version, cl_device.name, cl_device.version, cl_device.driver_version,
        repr(features), repr(set_here),
    ]  # fmt: skip
