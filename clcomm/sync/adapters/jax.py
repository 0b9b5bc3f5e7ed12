"""JAX's parameters and gradients under the Synchronizer: trees of arrays, other ones after each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError, needed, require_version
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.parameters import ParameterSpec
from clcomm.base.host.arrays import BFLOAT16, from_bfloat16, to_bfloat16
from clcomm.sync.adapters.adapter import FLAT_DTYPES, CopyingAdapter

with needed("jax"):
    import jax
require_version("jax", "0.10")


@dataclass
class Model:
    """A model's trees of arrays for a Synchronizer, which puts others in place of them.

    Attributes:
        params: of floating-point numbers, which are trained.
        grads: a tree like it, in which None stands for a gradient that is missing; None: all are.
        state: what is not trained, such as frozen parameters and running statistics, of any numeric dtype.
    """

    params: Any
    grads: Any = None
    state: Any = None

    def as_adapter(self) -> JaxAdapter:
        """Return what the Synchronizer accesses the model by."""
        return JaxAdapter(self)


class JaxAdapter(CopyingAdapter):
    """A Model under the Synchronizer; a leaf of the tree is a parameter, named by its path.

    In the flat space float16 and bfloat16 are float32: widening is exact, and gradients are averaged in float32 and
    rounded once. Raises ArgumentError where nothing is trainable, for leaves of `params` that are no arrays of
    floating-point numbers, for a tree of gradients that is not like the parameters', and, at a synchronisation, where
    names, shapes or dtypes are others than at the first one.
    """

    def __init__(self, model: Model):
        self._model = model
        self.specs = tuple(spec_of(name, leaf, "parameter") for name, leaf in named(model.params).items())
        if not self.specs:
            raise ArgumentError("params: expected at least one array, got none")
        self._dtypes = {name: str(leaf.dtype) for name, leaf in named(model.params).items()}
        self._means: dict[str, Any] = {}

    def decides_bits(self) -> list[str]:
        return [f"JAX {jax.__version__} on {jax.devices()[0].device_kind}"]

    def require_unchanged(self) -> None:
        before = {spec.name: f"shape {spec.shape} and {self._dtypes[spec.name]}" for spec in self.specs}
        now = {name: f"shape {leaf.shape} and {leaf.dtype}" for name, leaf in named(self._model.params).items()}
        for name in [*before, *now]:
            if now.get(name) != before.get(name):
                raise ArgumentError(
                    f"parameter {name!r}: expected {before.get(name, 'none')}, got {now.get(name, 'none')}; make a "
                    "new Synchronizer for another model"
                )

    def pull_parameters(self) -> None:
        for name, leaf in named(self._model.params).items():
            np.copyto(self._layout.view(self._arrays.params, name), widen(np.asarray(leaf)))

    def push_parameters(self) -> None:
        kinds = self._dtypes
        values = {name: _array(self._layout.view(self._arrays.params, name), kind) for name, kind in kinds.items()}
        self._model.params = _rebuilt(self._model.params, values)

    # --- gradients ---

    def _gradients(self) -> dict[str, Any]:
        if self._model.grads is None:
            return dict.fromkeys(self._dtypes)
        try:
            leaves = jax.tree.structure(self._model.params).flatten_up_to(self._model.grads)
        except (ValueError, TypeError, KeyError):
            raise ArgumentError(
                f"grads: expected a tree like the parameters', {jax.tree.structure(self._model.params)}, got "
                f"{jax.tree.structure(self._model.grads)}"
            ) from None
        return dict(zip(self._dtypes, leaves, strict=True))

    def has_gradients(self) -> bool:
        return any(each is not None for each in self._gradients().values())

    def drop_gradients(self) -> None:
        self._model.grads = None

    def pull_gradients(self, bucket: Bucket) -> None:
        """Copy a bucket's gradients into the flat space; a missing one counts as zero."""
        if bucket.index == 0:
            self._own, self._means = self._gradients(), {}
        for place in bucket.opening:
            self._pull(place.name, place.shape, self._own[place.name])

    def _pull(self, name: str, shape: tuple[int, ...], gradient: Any) -> None:
        if gradient is not None and np.shape(gradient) != shape:
            raise ArgumentError(f"gradient of {name!r}: expected shape {shape}, got {np.shape(gradient)}")
        values = np.zeros(()) if gradient is None else widen(np.asarray(gradient))
        own = self._layout.view(self._arrays.grads, name)
        if not np.can_cast(values.dtype, own.dtype, "same_kind"):
            raise ArgumentError(f"gradient of {name!r}: expected {self._dtypes[name]}, got {values.dtype}")
        np.copyto(own, values, casting="same_kind")

    def push_gradients(self, bucket: Bucket) -> None:
        for place in bucket.closing:
            self._means[place.name] = _array(
                self._layout.view(self._arrays.reduced, place.name), self._dtypes[place.name]
            )
        if len(self._means) == len(self._dtypes):
            self._set(self._means)

    def _set(self, gradients: dict[str, Any]) -> None:
        self._model.grads = _rebuilt(self._model.params, gradients)

    def pull_written(self) -> tuple[str, ...]:
        """Copy gradients that are others than the averaged ones into the flat space; return their names."""
        shapes = {spec.name: spec.shape for spec in self.specs}
        found = {
            n: each for n, each in self._gradients().items() if each is not None and each is not self._means.get(n)
        }
        for name, gradient in found.items():
            self._pull(name, shapes[name], gradient)
        return tuple(found)

    def push_written(self, names: Sequence[str]) -> None:
        written = {name: _array(self._layout.view(self._arrays.grads, name), self._dtypes[name]) for name in names}
        self._set(self._gradients() | written)

    # --- what is not trained ---

    def extra_state(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(leaf) for name, leaf in named(self._model.state).items()}

    def load_extra_state(self, state: Mapping[str, np.ndarray]) -> None:
        if state:
            kinds = {name: str(leaf.dtype) for name, leaf in named(self._model.state).items()}
            self._model.state = _rebuilt(self._model.state, {name: _array(state[name], kinds[name]) for name in kinds})

    buffers, load_buffers = extra_state, load_extra_state


def named(tree: Any) -> dict[str, Any]:
    """Return a tree's arrays by their paths, such as "layers.0.weight"; ArgumentError for other leaves."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "array"
        if not isinstance(leaf, (jax.Array, np.ndarray)):
            raise ArgumentError(
                f"leaf {name!r}: expected an array, got {type(leaf).__name__}; with Equinox give eqx.filter(model, "
                "eqx.is_array)"
            )
        found[name] = leaf
    return found


def spec_of(name: str, array: Any, kind: str) -> ParameterSpec:
    """Return an array's place in a flat space; ArgumentError, which calls it a `kind`, for other dtypes."""
    if str(array.dtype) not in FLAT_DTYPES:
        raise ArgumentError(f"{kind} {name!r}: expected {', '.join(FLAT_DTYPES)}, got {array.dtype}")
    return ParameterSpec(name, tuple(array.shape), FLAT_DTYPES[str(array.dtype)])


def widen(values: np.ndarray) -> np.ndarray:
    """Return values as they are in a flat space, float32 for narrow ones."""
    if values.itemsize == 2 and (values.dtype == BFLOAT16 or str(values.dtype) == "bfloat16"):
        return from_bfloat16(values)
    return values


def narrow(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a flat space's values in an array's dtype, rounded to nearest."""
    return to_bfloat16(values) if dtype == BFLOAT16 else values.astype(dtype, copy=False)


def _array(values: np.ndarray, dtype: str) -> Any:
    """Return a new array of JAX's."""
    return jax.numpy.array(values.astype(jax.numpy.dtype(dtype)), copy=True)


def _rebuilt(tree: Any, leaves: dict[str, Any]) -> Any:
    """Return a tree of other leaves, divided among the process's devices as those of this one are."""
    placed = [_placed(leaves[name], leaf) for name, leaf in named(tree).items()]
    return jax.tree.unflatten(jax.tree.structure(tree), placed)


def _placed(values: Any, like: Any) -> Any:
    sharding = getattr(like, "sharding", None)
    return values if sharding is None or len(sharding.device_set) == 1 else jax.device_put(values, sharding)
