"""Libraries with models to synchronise, a row each, behind one interface: what the adapters' common tests need.

A new library is a class here, in LIBRARIES, with the methods of Library; the tests of `test_contract.py` then run.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from clcomm.base.host.arrays import from_bfloat16, to_bfloat16
from tests import numpy_models

#: Names and shapes of a model's parameters.
SHAPES = {"first": (5, 7), "second": (7,), "third": (3, 2, 4)}


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return values rounded to a dtype, as float32 where NumPy has no such dtype or it is a narrow one."""
    if dtype == "bfloat16":
        return from_bfloat16(to_bfloat16(np.asarray(values, np.float32)))
    narrow = np.asarray(values).astype(dtype)
    return narrow.astype(np.float32) if dtype == "float16" else narrow


class Library:
    """A library's models: objects with the parameters of SHAPES as attributes."""

    #: Dtypes of parameters that it has and that are trained.
    dtypes: tuple[str, ...] = ("float32", "float64", "float16", "bfloat16")
    #: Whether it has parameters that are not trained.
    freezes = True
    #: Whether one parameter may have two names.
    ties = True
    #: Whether a parameter is an object, which no other may take the place of.
    keeps = True
    #: Whether a gradient that no rank has stays missing; otherwise it is zero, as the library's own are.
    misses = True

    def model(self, dtype: str = "float32", scale: float = 1.0, tied: bool = False, frozen: bool = False) -> Any:
        """Return a model with `scale` times ones; tied: `again` is `first`; frozen: `second` is not trained."""
        model = self.empty()
        for name, shape in SHAPES.items():
            self.add(model, name, np.full(shape, scale, np.float32), dtype, not (frozen and name == "second"))
        if tied:
            self.add_again(model, "first", "again")
        return model

    def empty(self) -> Any:
        raise NotImplementedError

    def add(self, model: Any, name: str, values: np.ndarray, dtype: str, trained: bool = True) -> None:
        """Give a model a parameter, in place of the one of this name if there is one."""
        raise NotImplementedError

    def add_again(self, model: Any, name: str, other: str) -> None:
        setattr(model, other, getattr(model, name))

    def parameter(self, model: Any, name: str) -> Any:
        return getattr(model, name)

    def backward(self, model: Any, gradients: dict[str, np.ndarray]) -> None:
        """Add to gradients, by the library's backward where it has one; values fit the parameter's dtype."""
        raise NotImplementedError

    def values(self, model: Any, name: str) -> np.ndarray:
        """Return a parameter's values, narrow ones as float32."""
        raise NotImplementedError

    def gradient(self, model: Any, name: str) -> np.ndarray | None:
        """Return a parameter's gradient, likewise."""
        raise NotImplementedError


class Numpy(Library):
    dtypes = ("float32", "float64", "float16")
    freezes = False

    def empty(self):
        return numpy_models.Model(())

    def add(self, model, name, values, dtype, trained=True):
        model.parameters[name] = numpy_models.Parameter(values.astype(dtype))

    def add_again(self, model, name, other):
        model.parameters[other] = model.parameters[name]

    def parameter(self, model, name):
        return model.parameters[name]

    def backward(self, model, gradients):
        for name, gradient in gradients.items():
            parameter = model.parameters[name]
            more = gradient.astype(parameter.data.dtype)
            parameter.grad = more if parameter.grad is None else parameter.grad + more

    def values(self, model, name):
        return rounded(model[name].data, str(model[name].data.dtype))

    def gradient(self, model, name):
        gradient = model[name].grad
        return None if gradient is None else rounded(gradient, str(gradient.dtype))


class Exported:
    """A tensor of which nothing is known but that it speaks DLPack."""

    def __init__(self, array: np.ndarray):
        self._array = array

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)


class Dlpack(Numpy):
    """Tensors of any library in the host's memory."""

    def add(self, model, name, values, dtype, trained=True):
        super().add(model, name, values, dtype, trained)
        model.parameters[name].data = Exported(model.parameters[name].data)

    def backward(self, model, gradients):
        for name, gradient in gradients.items():
            parameter = model.parameters[name]
            more = gradient.astype(np.from_dlpack(parameter.data).dtype)
            added = more if parameter.grad is None else np.from_dlpack(parameter.grad) + more
            parameter.grad = Exported(np.array(added))

    def values(self, model, name):
        data = np.from_dlpack(model[name].data)
        return rounded(data, str(data.dtype))

    def gradient(self, model, name):
        gradient = None if model[name].grad is None else np.from_dlpack(model[name].grad)
        return None if gradient is None else rounded(gradient, str(gradient.dtype))


class Engine(Library):
    dtypes = ("float32",)

    def empty(self):
        from clcomm.engine import Module

        return Module()

    def add(self, model, name, values, dtype, trained=True):
        from clcomm.engine import Parameter

        setattr(model, name, Parameter(values, requires_grad=trained))

    def backward(self, model, gradients):
        from clcomm.engine import Tensor

        for name, gradient in gradients.items():
            (self.parameter(model, name) * Tensor(gradient)).sum().backward()

    def values(self, model, name):
        return self.parameter(model, name).numpy()

    def gradient(self, model, name):
        gradient = self.parameter(model, name).grad
        return None if gradient is None else gradient.numpy()


class Netcl(Library):
    dtypes = ("float32", "float16")
    ties = False  # named_parameters() of a NetclModel yields each tensor once, whatever its names

    def empty(self):
        from clcomm.sync.adapters.netcl import prepare

        self.queue = prepare().queue
        from netcl.nn.layers import Module

        return Module()

    def add(self, model, name, values, dtype, trained=True):
        from netcl.core.tensor import Tensor

        tensor = Tensor.from_host(self.queue, values.astype(dtype), dtype=dtype)
        tensor.requires_grad = trained
        setattr(model, name, tensor)

    def _read(self, tensor):
        values = tensor.to_host()
        return rounded(values, str(values.dtype))

    def backward(self, model, gradients):
        from netcl.core.tensor import Tensor

        for name, gradient in gradients.items():
            tensor = getattr(model, name)
            more = gradient if tensor.grad is None else self._read(tensor.grad) + gradient
            dtype = "float16" if tensor.dtype in ("half", "float16") else "float32"
            tensor.grad = Tensor.from_host(self.queue, more.astype(dtype), dtype=dtype)

    def values(self, model, name):
        return self._read(getattr(model, name))

    def gradient(self, model, name):
        tensor = getattr(model, name)
        return None if tensor.grad is None else self._read(tensor.grad)


class Torch(Library):
    def empty(self):
        import torch

        return torch.nn.Module()

    def add(self, model, name, values, dtype, trained=True):
        import torch

        setattr(model, name, torch.nn.Parameter(torch.from_numpy(values).to(getattr(torch, dtype)), trained))

    def backward(self, model, gradients):
        import torch

        for name, gradient in gradients.items():
            parameter = getattr(model, name)
            (parameter * torch.from_numpy(np.asarray(gradient)).to(parameter.dtype)).sum().backward()

    def _read(self, tensor):
        return (tensor if tensor.element_size() > 2 else tensor.float()).detach().numpy()

    def values(self, model, name):
        return self._read(getattr(model, name))

    def gradient(self, model, name):
        gradient = getattr(model, name).grad
        return None if gradient is None else self._read(gradient)


class Tinygrad(Library):
    misses = False

    def empty(self):
        import clcomm.tinygrad  # noqa: F401  # before tinygrad opens its device

        return type("Model", (), {})()

    def add(self, model, name, values, dtype, trained=True):
        from tinygrad import Tensor

        setattr(model, name, Tensor(values).cast(dtype).realize().is_param_(trained))

    def backward(self, model, gradients):
        from tinygrad import Tensor

        for name, gradient in gradients.items():
            parameter = getattr(model, name)
            (parameter * Tensor(np.array(gradient)).cast(parameter.dtype)).sum().backward()

    def _read(self, tensor):
        stored = tensor.contiguous().realize()  # tinygrad's kernels round narrow numbers where they are stored
        return (stored if stored.dtype.itemsize > 2 else stored.float()).numpy()

    def values(self, model, name):
        return self._read(getattr(model, name))

    def gradient(self, model, name):
        gradient = getattr(model, name).grad
        return None if gradient is None else self._read(gradient)


class Jax(Library):
    ties = False  # a leaf that is used in two places has one name
    keeps = False
    misses = False

    def empty(self):
        import jax

        from clcomm.jax import Model

        jax.config.update("jax_enable_x64", True)  # which float64 needs
        model = Model({}, state={})
        model.names = {}
        return model

    def add(self, model, name, values, dtype, trained=True):
        import jax

        (model.params if trained else model.state)[name] = jax.numpy.asarray(values).astype(dtype)

    def add_again(self, model, name, other):
        model.names[other] = name

    def parameter(self, model, name):
        return (model.params | model.state)[model.names.get(name, name)]

    def backward(self, model, gradients):
        import jax

        def loss(params):
            used = {name: params[model.names.get(name, name)] for name in gradients}
            return sum((used[n] * jax.numpy.asarray(each, used[n].dtype)).sum() for n, each in gradients.items())

        more = jax.grad(loss)(model.params)
        missing = set(model.params) - {model.names.get(name, name) for name in gradients}
        more |= dict.fromkeys(missing)  # JAX has zeros there
        former = model.grads or dict.fromkeys(more)
        model.grads = {n: _added(former[n], each) for n, each in more.items()}

    def _read(self, array):
        return np.asarray(array.astype("float32") if array.dtype.itemsize < 4 else array)

    def values(self, model, name):
        return self._read(self.parameter(model, name))

    def gradient(self, model, name):
        gradient = (model.grads or {}).get(model.names.get(name, name))
        return None if gradient is None else self._read(gradient)


def _added(one, other):
    return other if one is None else one if other is None else one + other


LIBRARIES = {
    "numpy": Numpy, "dlpack": Dlpack, "clcomm": Engine, "netcl": Netcl, "torch": Torch, "tinygrad": Tinygrad, "jax": Jax
}  # fmt: skip


def library(name: str) -> Library:
    """Return a library's row; the calling test is skipped where it is not installed."""
    if name != "dlpack" and find_spec(name) is None:
        pytest.skip(f"{name} is not installed; pip install -e '.[{name}]'")
    return LIBRARIES[name]()
