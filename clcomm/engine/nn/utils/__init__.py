"""Utilities of modules, with PyTorch's names."""

from __future__ import annotations

from collections.abc import Iterable

from clcomm.engine import functional as F
from clcomm.engine.modes import no_grad
from clcomm.engine.nn.utils import rnn
from clcomm.engine.tensor import Tensor
from clcomm.errors import ArgumentError

__all__ = ["clip_grad_norm_", "clip_grad_value_", "parameters_to_vector", "rnn", "vector_to_parameters"]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients in place so that the norm of all of them together is at most `max_norm`; return the norm before.

    Those of this process alone: a Synchronizer's `clip_grad_norm` has the norm of the ranks' mean. ArgumentError,
    changing nothing, for a norm that is not finite with `error_if_nonfinite`.
    """
    with no_grad():
        gradients = _gradients(parameters)
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
    """Limit each element of the gradients to [-clip_value, clip_value], in place."""
    with no_grad():
        for each in _gradients(parameters):
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


def _gradients(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    return [each.grad for each in given if each.grad is not None]
