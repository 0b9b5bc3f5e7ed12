"""The collectives as JAX's primitive runs them, each with what its backward runs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import jax
import numpy as np
from jax._src import core, dispatch, effects
from jax.interpreters import ad, batching, mlir

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.jax.ffi import CALLS, HANDLER, Kind


@dataclass(frozen=True)
class _OfRanks:
    """A collective of a Communicator's ranks, whose results are like its operands."""

    comm: Communicator

    def results(self, operands: Sequence[Any]) -> list[Kind]:
        return [(each.shape, each.dtype) for each in operands]


@dataclass(frozen=True)
class AllReduce(_OfRanks):
    """The reduction of an array over the ranks; see `Communicator.all_reduce`."""

    op: str
    name = "all_reduce"

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        self.comm.all_reduce(operands[0], self.op, out=results[0])

    def transposed(self) -> Collective:
        require_linear(self)
        return self


@dataclass(frozen=True)
class AllGather(_OfRanks):
    """All ranks' arrays, stacked."""

    name = "all_gather"

    def results(self, operands: Sequence[Any]) -> list[Kind]:
        return [((self.comm.size, *each.shape), each.dtype) for each in operands]

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        self.comm.all_gather(operands[0], out=results[0])

    def transposed(self) -> Collective:
        return ReduceScatter(self.comm, "sum")


@dataclass(frozen=True)
class ReduceScatter(_OfRanks):
    """Row `rank` of the reduction of arrays with a row for each rank."""

    op: str
    name = "reduce_scatter"

    def results(self, operands: Sequence[Any]) -> list[Kind]:
        return [(each.shape[1:], each.dtype) for each in operands]

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        self.comm.reduce_scatter(operands[0], self.op, out=results[0][None])

    def transposed(self) -> Collective:
        require_linear(self)
        return AllGather(self.comm)


@dataclass(frozen=True)
class Broadcast(_OfRanks):
    """The array of one rank."""

    root: int
    name = "broadcast"

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        if self.comm.rank == self.root:
            np.copyto(results[0], operands[0])
        self.comm.broadcast(results[0], self.root)

    def transposed(self) -> Collective:
        return _Reduce(self.comm, self.root)


@dataclass(frozen=True)
class _Reduce(_OfRanks):
    """The sum of all ranks' arrays on one rank, zero on the others: the backward of a broadcast."""

    root: int
    name = "broadcast"

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        self.comm.all_reduce(operands[0], out=results[0])
        if self.comm.rank != self.root:
            results[0].fill(0)

    def transposed(self) -> Collective:
        return Broadcast(self.comm, self.root)


class _Reduction(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...


def require_linear(collective: _Reduction) -> None:
    """Raise ArgumentError for a reduction without a gradient."""
    if collective.op not in ("sum", "mean"):
        raise ArgumentError(
            f"{collective.name}: expected op 'sum' or 'mean' where gradients are computed, got {collective.op!r}; use "
            "jax.lax.stop_gradient"
        )


# --- The one primitive of JAX behind all collectives: an effect in the program's order, which jit and grad know. ---
# JAX threads a token through the calls of a program, and from one program to the next: so every rank runs the
# collectives in the order in which its program was written, whatever XLA computes at the same time.


class Collective(Protocol):
    """What the ranks compute together, linear in its operands; equal ones are one to JAX's caches."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def results(self, operands: Sequence[Any]) -> list[Kind]:
        """Return shapes and dtypes of the results for those of the operands."""

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        """Compute the results, in the memory of XLA's arrays."""

    def transposed(self) -> Collective:
        """Return what backward runs: the gradient is that of the sum of all ranks' losses."""


class _Order(effects.Effect):  # type: ignore[misc]
    def __str__(self) -> str:
        return "collectives of clcomm.jax, which take arrays of one device"

    __repr__ = __str__  # as JAX lists the effects of a program for several devices, which it refuses


_ORDER = _Order()
for _kinds in (effects.lowerable_effects, effects.ordered_effects, effects.control_flow_allowed_effects,
               effects.custom_derivatives_allowed_effects, effects.remat_allowed_effects):  # fmt: skip
    _kinds.add_type(_Order)

jax.ffi.register_ffi_target("clcomm", jax.ffi.pycapsule(ctypes.cast(HANDLER, ctypes.c_void_p).value), platform="cpu")
_PRIMITIVE = core.Primitive("clcomm")
_PRIMITIVE.multiple_results = True
_PRIMITIVE.def_impl(partial(dispatch.apply_primitive, _PRIMITIVE))


def run(collective: Collective, operands: Sequence[Any]) -> list[Any]:
    """Return the results of a collective, computed now or, within jit and grad, where the program stands.

    Raises the ranks' own error where it is computed now; a jitted function raises JAX's with the same text.
    """
    try:
        return list(_PRIMITIVE.bind(*operands, collective=collective))
    except jax.errors.JaxRuntimeError as error:
        raise (CALLS.error_of(error) or error) from None


def _abstract(*operands: Any, collective: Collective) -> tuple[list[Any], set[Any]]:
    return [core.ShapedArray(shape, dtype) for shape, dtype in collective.results(operands)], {_ORDER}


def _lower(context: Any, *operands: Any, collective: Collective) -> Sequence[Any]:
    ordered = context.replace(
        avals_in=[core.abstract_token, *context.avals_in], avals_out=[core.abstract_token, *context.avals_out]
    )
    build = jax.ffi.build_ffi_lowering_function("clcomm", has_side_effect=True)
    operands_are, results_are = (
        [(each.shape, each.dtype) for each in avals] for avals in (context.avals_in, context.avals_out)
    )
    number = np.int64(CALLS.number_of(collective, operands_are, results_are))
    token, *results = build(ordered, context.tokens_in.get(_ORDER), *operands, call=number).results
    context.set_tokens_out(context.tokens_in.update_tokens(mlir.TokenSet({_ORDER: token})))
    return [*results]


def _lower_elsewhere(context: Any, *operands: Any, collective: Collective) -> NoReturn:
    raise ArgumentError(
        f"{collective.name}: expected arrays on the CPU, got them on {context.module_context.platforms[0]}; set "
        "JAX_PLATFORMS=cpu"
    )


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, collective: Collective) -> tuple[list[Any], list[Any]]:
    values = run(collective, primals)
    if all(type(each) is ad.Zero for each in tangents):
        return values, [ad.Zero.from_primal_value(each) for each in values]
    collective.transposed()  # raises where it is not linear
    return values, run(collective, [ad.instantiate_zeros(each) for each in tangents])


def _transpose(cotangents: Sequence[Any], *operands: Any, collective: Collective) -> list[Any]:
    given = [ad.instantiate_zeros(each) for each in cotangents]
    return run(collective.transposed(), given)


def _refuse_batch(operands: Sequence[Any], axes: Sequence[Any], *, collective: Collective) -> NoReturn:
    raise ArgumentError(
        f"{collective.name}: expected outside of a mapped function, got one in jax.vmap; call it on the whole "
        "batch, after the map"
    )


_PRIMITIVE.def_effectful_abstract_eval(_abstract)
mlir.register_lowering(_PRIMITIVE, _lower, platform="cpu")
mlir.register_lowering(_PRIMITIVE, _lower_elsewhere)
ad.deflinear2(_PRIMITIVE, _transpose)
ad.primitive_jvps.__setitem__(_PRIMITIVE, _jvp)  # as calls, which Sphinx can imitate
batching.primitive_batchers.__setitem__(_PRIMITIVE, _refuse_batch)
