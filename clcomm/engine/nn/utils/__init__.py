"""Utilities of modules, with PyTorch's names."""

from __future__ import annotations

from collections.abc import Iterable

from clcomm.base.errors import ArgumentError
from clcomm.engine import functional as F
from clcomm.engine.flat import space_of
from clcomm.engine.modes import no_grad
from clcomm.engine.nn.utils import rnn
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor

__all__ = ["clip_grad_norm_", "clip_grad_value_", "parameters_to_vector", "rnn", "vector_to_parameters"]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients in place so that the norm of all of them together is at most `max_norm`; return the norm before.

    Those of this process alone. ArgumentError, changing nothing, for a norm that is not finite with
    `error_if_nonfinite`, and where ranks divide the gradients: `clcomm.clip_grad_norm` has the norm of all.
    """
    with no_grad():
        gradients = _gradients("clip_grad_norm_", parameters, is_norm=True)
        if not gradients:
            return Tensor(0.0)
        total = F.norm(F.stack([F.norm(each, norm_type) for each in gradients]), norm_type)
        if error_if_nonfinite and not abs(total.item()) < float("inf"):
            raise ArgumentError(f"clip_grad_norm_: expected a finite norm of the gradients, got {total.item()}")
        scale = F.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        for each in gradients:
            each *= scale
    return total


def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Limit each element of the gradients to [-clip_value, clip_value], in place.

    Raises ArgumentError where a DistributedOptimizer averages the gradients in its step.
    """
    with no_grad():
        for each in _gradients("clip_grad_value_", parameters, is_norm=False):
            F.overwrite(each, lambda gradient: F.clamp(gradient, -float(clip_value), float(clip_value)))


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """Return the values of parameters, one behind the other, as one dimension."""
    return F.concat([F.reshape(each, (-1,)) for each in parameters])


def vector_to_parameters(vec: Tensor, parameters: Iterable[Tensor]) -> None:
    """Write the values of one dimension to parameters, one behind the other; ArgumentError unless they are as many."""
    own = list(parameters)
    parts = F.split(vec.detach(), [each.numel() for each in own])
    with no_grad():
        for each, part in zip(own, parts, strict=True):
            each.copy_(F.reshape(part, each.shape))


def _gradients(name: str, parameters: Tensor | Iterable[Tensor], is_norm: bool) -> list[Tensor]:
    given = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    for each in given:
        if isinstance(each, Parameter) and (who := _divided_by(each, is_norm)):
            raise ArgumentError(
                f"{name}: expected gradients that this rank has, whole and averaged, got those of a model that {who}; "
                "use clcomm.clip_grad_norm(sync, model, max_norm)"
            )
    return [each.grad for each in given if each.grad is not None]


def _divided_by(parameter: Parameter, is_norm: bool) -> str:
    """Return what divides a parameter's gradient, or that of the model, so that this rank cannot clip; "": nothing."""
    space = space_of(parameter)
    if space is not None and (space.blocks is not None or space.step_averages):
        return "a DistributedOptimizer averages in its step"
    if is_norm and space is not None and not space.has_alike_devices and space.is_averaged(parameter):
        return "ranks with several kinds of devices have, whose norms would differ in the last bits"
    if is_norm and parameter.part is not None:
        return "tensor-parallel ranks divide"
    return "a pipeline's stages divide" if is_norm and parameter.stages is not None else ""
