"""Layers of which each rank has a part refuse inputs of other widths on every rank, before a kernel reads anything."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.engine import Linear, MultiheadAttention, Sequential, Tensor
from clcomm.engine.ops.blocks import Block, copy_part
from clcomm.engine.ops.broadcasting import launch_broadcast
from clcomm.engine.ops.matmul import column_sums, multiply
from clcomm.engine.ops.reduce import sum_over
from clcomm.engine.tensor import copy_into
from clcomm.errors import ArgumentError, MismatchError
from clcomm.parallel.exchange import ACTIVATIONS, Exchange
from clcomm.parallel.tensor_parallel import (
    ColumnParallel,
    HeadsParallel,
    RowParallel,
    SequenceParallel,
    parallelize_module,
)
from tests.helpers import one_line
from tests.parallel.tensor_parallel.tasks import device, drawn

pytestmark = pytest.mark.mpi(min_size=1)

#: Of the whole layers, for 1 to 4 ranks.
_IN, _OUT = 24, 12
STYLES = {
    "column": ColumnParallel(),
    "column gathered": ColumnParallel(gather_output=True),
    "column of a sequence": ColumnParallel(sequence_axis=-2),
    "row": RowParallel(),
    "row split": RowParallel(split_input=True),
    "row of a sequence": RowParallel(sequence_axis=-2),
    "row split, of a sequence": RowParallel(split_input=True, sequence_axis=-2),
}


def values(*shape: int) -> np.ndarray:
    return drawn(*shape).standard_normal(shape).astype(np.float32)


def of(*shape: int) -> Tensor:
    return Tensor(values(*shape), device())


def refusals(comm, run) -> list[str]:
    """Return the errors of all ranks; "" where there was none."""
    try:
        run()
    except (ArgumentError, MismatchError) as error:
        return comm.all_gather_object(str(error))
    return comm.all_gather_object("")


@pytest.mark.parametrize("name", STYLES)
def test_every_other_width_is_refused_and_the_right_one_gives_the_whole_layers_result(several, name):
    style, whole = STYLES[name], Linear(_IN, _OUT, device=device())
    whole.load_state_dict({"weight": values(_OUT, _IN), "bias": values(_OUT)})
    layer = parallelize_module(Sequential(whole), several, {"0": style})
    takes_part = isinstance(style, RowParallel) and not style.split_input
    right = _IN // several.size if takes_part else _IN
    for width in {*range(1, _IN + 9), 4 * _IN} - {right}:
        errors = refusals(several, lambda width=width: layer(of(several.size, width)))
        assert all(f"expected x with {right} columns" in each and "\n" not in each for each in errors), width
        assert not takes_part or width != _IN or errors[0].endswith("a whole x takes split_input=True")
    rows = 2 * several.size
    x = values(rows, _IN)
    own = x[:, several.rank * right :][:, :right] if takes_part else x
    if isinstance(style, ColumnParallel) and style.sequence_axis is not None:
        own = np.split(x, several.size)[several.rank]
    result = layer(Tensor(np.ascontiguousarray(own), device())).numpy()
    expected = x.astype(np.float64) @ values(_OUT, _IN).T.astype(np.float64) + values(_OUT)
    if isinstance(style, RowParallel) and style.sequence_axis is not None:
        expected = np.split(expected, several.size)[several.rank]
    elif isinstance(style, ColumnParallel) and not style.gather_output:
        expected = np.split(expected, several.size, 1)[several.rank]
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_attention_of_another_width_is_refused(several):
    heads = 2 * several.size
    layer = parallelize_module(MultiheadAttention(4 * heads, heads, device=device()), several, HeadsParallel())
    for width in (1, 4 * heads - 4, 4 * heads + 4, 12 * heads):
        x, other = of(2, 3, width), of(2, 3, 4 * heads)
        for given in ((x,), (other, x), (other, other, x)):
            errors = refusals(several, lambda given=given: layer(*given))
            assert all(f"expected x with {4 * heads} columns" in each for each in errors), (width, len(given))


@pytest.mark.mpi(min_size=2)
def test_parts_of_a_sequence_that_differ_between_ranks_are_refused(several):
    """Even where they are padded to blocks of one size."""
    model = Sequential(Linear(2, 2, device=device()), Linear(2, 2, device=device()))
    model = parallelize_module(model, several, {"1": SequenceParallel(gather_output=True)})
    tokens = 2 + (several.rank == several.size - 1)
    errors = refusals(several, lambda: model(of(tokens, 2)))
    assert all(errors) and all("\n" not in each for each in errors)


@pytest.mark.mpi(min_size=2)
def test_an_input_that_differs_between_ranks_is_refused_in_backward_too(several):
    ranks = Exchange(several, device())
    rows = 1 + (several.rank == 0)
    for run in (
        lambda: ranks.gather(of(rows, 3), 0, ACTIVATIONS),
        lambda: ranks.summed(of(rows, 3), ACTIVATIONS),
        lambda: ranks.summed_part(of(several.size, rows), 0, ACTIVATIONS),
    ):
        assert all(refusals(several, run))


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_products_of_shapes_that_do_not_fit_are_refused_where_kernels_are_queued(transposed):
    """Whatever calls the functions below the public ones."""
    left, right = [(3, 5), (5, 3)][transposed[0]], [(5, 4), (4, 5)][transposed[1]]
    options = {"transpose_a": transposed[0], "transpose_b": transposed[1]}
    multiply(of(*left), of(*right), of(3, 4), **options)
    for shapes in ((left, right, (4, 4)), (left, right, (3, 5)), (left, (6, 6), (3, 4)), ((6, 6), right, (3, 4))):
        with pytest.raises(ArgumentError, match=r"^multiply: shapes .* do not give") as caught:
            multiply(*(of(*shape) for shape in shapes), **options)
        one_line(caught)


def test_other_inner_functions_refuse_what_leaves_their_tensors():
    for run in (
        lambda: multiply(of(3, 5), of(5, 4), of(3, 4), bias=of(3)),
        lambda: column_sums(of(3, 5), of(3)),
        lambda: copy_into(of(3, 5), of(3, 6)),
        lambda: sum_over(of(3, 5), (0,), out=of(3)),
        lambda: launch_broadcast("add_broadcast", of(3, 5), of(3, 5), of(4)),
        lambda: launch_broadcast("add_broadcast", of(3, 1), of(3, 5), of(5)),
        lambda: copy_part((3, 5), of(3, 5), Block(0, (5, 1)), of(3, 5), Block(1, (5, 1))),
        lambda: copy_part((3,), of(2), Block(0, (1,)), of(3), Block(0, (1,))),
        lambda: copy_part((3,), of(3), Block(0, (1,)), of(3), Block(1, (-1,))),
    ):
        with pytest.raises(ArgumentError) as caught:
            run()
        one_line(caught)
    copy_part((3,), of(3), Block(0, (1,)), of(3), Block(2, (-1,)))
