"""Summary of a model: its layers, by its library, and its parameters, by the bucket plan."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import ParameterSpec
from clcomm.insight.summary.model_summary import Layer, ParameterPlace, Summary
from clcomm.sync.adapters import adapter_of


def summarize(
    model: object, input_shape: Sequence[int], buckets: Iterable[Bucket] = (), order: Sequence[str] = ()
) -> Summary:
    """Return a model's layers and parameters, found by a forward pass over a batch of zeros.

    Args:
        model: any that a Synchronizer accepts; for libraries other than clcomm and PyTorch only parameters are listed.
        input_shape: of a batch, (N, ...).
        buckets: from `Synchronizer.bucket_plan`; without it no parameter has a bucket.
        order: parameter names in the observed order of completed gradients; the others follow
            in the layout's order.

    Raises:
        ArgumentError: for an empty shape, a size below 1, and an input that one of clcomm's models cannot take;
            PyTorch's models raise their own exceptions.
    """
    specs = adapter_of(model).specs
    layers = tuple(_layers(model, specs, tuple(input_shape)))
    expected = [place.name for place in FlatLayout(specs).ranges]
    ready = {name: index for index, name in enumerate(dict.fromkeys([*order, *expected]), 1)}
    held: dict[str, list[int]] = {}
    for bucket in buckets:
        for place in bucket.ranges:
            held.setdefault(place.name, []).append(bucket.index)
    places = (
        ParameterPlace(spec.name, tuple(spec.shape), spec.size, tuple(held.get(spec.name, ())), ready[spec.name])
        for spec in specs
    )
    return Summary(layers, tuple(places))


def _layers(model: object, specs: Iterable[ParameterSpec], input_shape: tuple[int, ...]) -> Iterable[Layer]:
    if len(input_shape) < 1 or min(input_shape) < 1:
        raise ArgumentError(f"input_shape: expected that of a batch, such as (1, 3, 32, 32), got {input_shape}")
    torch = sys.modules.get("torch")
    for candidate in (model, getattr(model, "module", None)):  # a wrapper has the wrapped module's layers
        if torch is not None and isinstance(candidate, torch.nn.Module):
            from clcomm.insight.summary.torch import layers_of as torch_layers

            return torch_layers(candidate, input_shape)
    if hasattr(model, "flat_space"):
        from clcomm.insight.summary.native import layers_of as native_layers

        return native_layers(model, input_shape)
    groups: dict[str, list[str]] = {}
    for spec in specs:
        groups.setdefault(spec.name.rpartition(".")[0], []).append(spec.name)
    return [Layer(name, "", None, tuple(names), None, None) for name, names in groups.items()]
