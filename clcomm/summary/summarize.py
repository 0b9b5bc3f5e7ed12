"""Puts a model's summary together: its layers by the library it comes from, its parameters by the bucket plan."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from clcomm.adapters import replica_of
from clcomm.buckets import Bucket
from clcomm.errors import ArgumentError
from clcomm.layout import FlatLayout, ParameterSpec
from clcomm.summary.parts import Layer, ParameterPlace, Summary


def summarize(
    model: Any, input_shape: Sequence[int], buckets: Iterable[Bucket] = (), order: Sequence[str] = ()
) -> Summary:
    """Return what a model consists of; it computes one batch of zeros for that, and keeps nothing of it.

    model: as for the Synchronizer; of others than this package's engine and PyTorch only parameters are known.
    input_shape: of a batch, (N, ...). buckets: the plan, from `Synchronizer.bucket_plan`; none: no bucket is named.
    order: names in the order in which backward was seen to complete gradients; those not in it follow in the layout's.
    Raises ArgumentError for an input that the model can't take.
    """
    specs = replica_of(model).specs
    layers = tuple(_layers(model, specs, tuple(input_shape)))
    expected = [slot.name for slot in FlatLayout(specs).slots]
    ready = {name: index for index, name in enumerate(dict.fromkeys([*order, *expected]), 1)}
    held: dict[str, list[int]] = {}
    for bucket in buckets:
        for slot in bucket.slots:
            held.setdefault(slot.name, []).append(bucket.index)
    places = (
        ParameterPlace(spec.name, tuple(spec.shape), spec.size, tuple(held.get(spec.name, ())), ready[spec.name])
        for spec in specs
    )
    return Summary(layers, tuple(places))


def _layers(model: Any, specs: Iterable[ParameterSpec], input_shape: tuple[int, ...]) -> Iterable[Layer]:
    if len(input_shape) < 1 or min(input_shape) < 1:
        raise ArgumentError(f"input_shape: expected that of a batch, such as (1, 3, 32, 32), got {input_shape}")
    torch = sys.modules.get("torch")
    for candidate in (model, getattr(model, "module", None)):  # a wrapper of a module has its layers
        if torch is not None and isinstance(candidate, torch.nn.Module):
            from clcomm.summary.torch import layers_of as torch_layers

            return torch_layers(candidate, input_shape)
    if hasattr(model, "flat_space"):
        from clcomm.summary.native import layers_of as native_layers

        return native_layers(model, input_shape)
    groups: dict[str, list[str]] = {}
    for spec in specs:
        groups.setdefault(spec.name.rpartition(".")[0], []).append(spec.name)
    return [Layer(name, "", None, tuple(names), None, None) for name, names in groups.items()]
