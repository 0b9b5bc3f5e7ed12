"""The engine under the names that PyTorch has in its top module: `import clcomm.as_torch as torch`.

Tensors are made on `default_device()`; values are float32, indices int32. A name that is not here has no equal in the
engine. docs/ported.md has the imports of a script that moves over, and scripts that did.
"""

from __future__ import annotations

import builtins
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from clcomm import optim
from clcomm.as_torch import data, distributions
from clcomm.base.errors import ArgumentError
from clcomm.engine import Device, Tensor, default_device, nn, no_grad, recomputation, weights
from clcomm.engine.creation import *  # noqa: F403 - the names in its __all__
from clcomm.engine.creation import tensor, zeros
from clcomm.engine.functional import *  # noqa: F403 - the names in its __all__
from clcomm.engine.functional import cross, swap_dimensions, vector_norm
from clcomm.engine.fusion import Fused
from clcomm.engine.gradients import grad
from clcomm.engine.modes import enable_grad, is_recording, set_grad_enabled
from clcomm.engine.nn import Generator, manual_seed
from clcomm.engine.tensor import BOOL, FLOAT32, INT32

__all__ = [
    "Generator", "compile", "data", "device", "distributions", "enable_grad", "jit", "load", "manual_seed", "nn",
    "optim", "save", "set_grad_enabled", "utils",
]  # fmt: skip

float32 = float = FLOAT32
int32 = int64 = int = long = INT32
bool = BOOL
isnan, isinf, isfinite, numel = Tensor.isnan, Tensor.isinf, Tensor.isfinite, Tensor.numel
inference_mode, is_grad_enabled = no_grad, is_recording
transpose = swap_dimensions  # type: ignore[assignment]  # of PyTorch's arguments
finfo, iinfo = np.finfo, np.iinfo


def _linalg_norm(A: Tensor, ord: Any = None, dim: Any = None, keepdim: Any = False) -> Tensor:
    """Return the norm of vectors, or Frobenius's of matrices; ArgumentError for other norms of matrices."""
    of_matrix = A.ndim == 2 if dim is None else isinstance(dim, tuple) and len(dim) == 2
    if ord not in (None, "fro") and (of_matrix or (dim is None and A.ndim != 1)):
        raise ArgumentError(f"norm: ord: expected None or 'fro' of a matrix, got {ord!r}")
    return vector_norm(A, 2.0 if ord in (None, "fro") else ord, dim, keepdim)


linalg = SimpleNamespace(norm=_linalg_norm, vector_norm=vector_norm, cross=partial(cross, axis=-1))


class FloatTensor:
    """PyTorch's constructor of float32 tensors: of the sizes given, zeros here, or of values."""

    dtype: np.dtype = FLOAT32

    def __new__(cls, *given: Any) -> Any:
        if given and builtins.all(isinstance(each, (builtins.int, np.integer)) for each in given):
            return zeros(*given, dtype=cls.dtype)
        return tensor(given[0] if given else (), dtype=cls.dtype)


class LongTensor(FloatTensor):
    """That of indices."""

    dtype = INT32


def Variable(x: Tensor, requires_grad: Any = False) -> Tensor:
    """Return the tensor itself: PyTorch's former wrapper."""
    return x.requires_grad_(requires_grad) if requires_grad else x


utils = SimpleNamespace(data=data, checkpoint=recomputation)
autograd = SimpleNamespace(grad=grad, Variable=Variable)


class device:
    """The default device, if it is of the kind that a name of PyTorch's means: "cuda", "xpu" and "mps" are GPUs.

    Raises ArgumentError where it is of another kind.
    """

    def __new__(cls, name: Any = "cpu", index: Any = None) -> Any:
        own = default_device()
        if isinstance(name, Device):
            return name
        kind = str(name).partition(":")[0]
        wanted = {"cuda": "gpu", "xpu": "gpu", "mps": "gpu"}.get(kind, kind)
        if wanted != own.kind:
            raise ArgumentError(
                f"device: expected {own.kind!r}, the kind of the default device, got {name!r}; "
                f"clcomm.engine.set_default_device({wanted!r}) selects another"
            )
        return own


class _Accelerator:
    """PyTorch's `torch.accelerator`: the default device, where it is no CPU."""

    @staticmethod
    def is_available() -> Any:
        return default_device().kind != "cpu"

    @staticmethod
    def current_accelerator() -> Device | None:
        return default_device() if _Accelerator.is_available() else None


accelerator = _Accelerator()
#: CUDA, and Apple's, are never there: an OpenCL GPU is the accelerator.
cuda = SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)
backends = SimpleNamespace(mps=SimpleNamespace(is_available=lambda: False), cudnn=SimpleNamespace())


def compile(model: Any = None, **options: Any) -> Any:
    """Return a model or a function itself, which means the same: PyTorch's compiler has no equal. As a decorator, too.

    A function of elements is faster as `clcomm.engine.fused`.
    """
    return (lambda model: model) if model is None else model


def _scripted(obj: Any, **options: Any) -> Any:
    """Return a function whose operations on elements are fused where they can be; a module itself."""
    return obj if isinstance(obj, nn.Module) else Fused(obj, strict=False)


jit = SimpleNamespace(script=_scripted, trace=lambda func, *args, **options: func, ignore=lambda fn: fn)


def is_tensor(value: object) -> Any:
    """Return whether a value is a tensor."""
    return isinstance(value, Tensor)


def t(x: Tensor) -> Tensor:
    """Return a matrix transposed."""
    return x.t()


def take(input: Tensor, index: Tensor) -> Tensor:  # type: ignore[no-redef]
    """Return the elements at indices of a tensor as if it had one dimension, in the indices' shape."""
    return input.reshape(-1)[index.reshape(-1)].reshape(index.shape)


def save(state: Any, path: Any) -> None:
    """Write a `state_dict` of arrays or tensors to a file, as safetensors; see `clcomm.engine.weights.save`."""
    if not isinstance(state, dict):
        raise ArgumentError(f"save: expected a state_dict, got {type(state).__name__}; save model.state_dict()")
    weights.save(path, {key: each.numpy() if isinstance(each, Tensor) else each for key, each in state.items()})


def load(path: Any, map_location: object = None, weights_only: object = True) -> dict[str, np.ndarray]:
    """Return the arrays of a file that `save` wrote, for `load_state_dict`."""
    return weights.load(path)


def __getattr__(name: str) -> NoReturn:
    if name in ("double", "float64", "half", "float16", "bfloat16"):
        raise AttributeError(f"clcomm.as_torch has no {name}: values are float32; remove it, or train with PyTorch")
    raise AttributeError(f"clcomm.as_torch has no {name}: the engine has no equal of torch.{name}")
