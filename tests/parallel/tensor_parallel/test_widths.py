"""Divided layers refuse inputs of other widths, and rows that ranks have parts of are refused where all count."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.engine import Linear, MultiheadAttention, Sequential, Tensor
from clcomm.engine import functional as F
from clcomm.engine.modes import no_grad
from clcomm.engine.ops.blocks import Block, copy_part
from clcomm.engine.ops.matmul import column_sums, multiply
from clcomm.engine.ops.reduce import sum_over
from clcomm.engine.ops.types import launch_broadcast
from clcomm.engine.tensor import copy_into
from clcomm.parallel.exchange import ACTIVATIONS, Exchange
from clcomm.parallel.tensor_parallel import (
    ColumnParallel,
    HeadsParallel,
    RowParallel,
    SequenceParallel,
    parallelize_module,
)
from models.gpt import next_token_loss
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
    assert all("expected one element or more" in each for each in refusals(several, lambda: layer(of(0, right))))
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
    layer = parallelize_module(
        MultiheadAttention(4 * heads, heads, batch_first=True, device=device()), several, HeadsParallel()
    )
    for width in (1, 4 * heads - 4, 4 * heads + 4, 12 * heads):
        x, other = of(2, 3, width), of(2, 3, 4 * heads)
        for given in ((x,), (other, x), (other, other, x)):
            errors = refusals(several, lambda given=given: layer(*given, need_weights=False))
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


#: What compares the columns of a row with each other.
CONSUMERS = {
    "cross_entropy": lambda y, labels: F.cross_entropy(y, labels),
    "smoothed cross_entropy": lambda y, labels: F.cross_entropy(y, labels, label_smoothing=0.1),
    "nll_loss": lambda y, labels: F.nll_loss(y, labels),
    "softmax": lambda y, labels: F.softmax(y),
    "log_softmax": lambda y, labels: F.log_softmax(y * 0.5 + 1.0),
    "logsumexp": lambda y, labels: F.logsumexp(F.gelu(y)),
    "argmax": lambda y, labels: F.argmax(y.detach()),
    "max": lambda y, labels: F.max(F.exp(y)),
    "max of rows": lambda y, labels: F.max(F.maximum(y, 0 * y), -1),
    "sort": lambda y, labels: F.sort(F.hardswish(y)),
    "rms_norm": lambda y, labels: F.rms_norm(F.where(y > 0, y, 0.5), y.shape[-1]),
    "cross_entropy of masked logits": lambda y, labels: F.cross_entropy(y.masked_fill(y > 9, 0.0), labels),
    "layer_norm": lambda y, labels: F.layer_norm(y[:2], y.shape[-1]),
    "loss of a sequence": lambda y, labels: next_token_loss(
        F.reshape(y, (3, 1, -1)), Tensor(labels.reshape(3, 1), device())
    ),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", CONSUMERS)
def test_rows_of_which_ranks_have_parts_are_refused_where_columns_are_compared(several, name):
    """A head without `gather_output` under a plain cross-entropy: half of the classes would count."""
    labels = np.zeros(3, np.int32)
    for gathers in (False, True):
        head = Sequential(Linear(_IN, _OUT, device=device()))
        model = parallelize_module(head, several, {"0": ColumnParallel(gather_output=gathers)})
        for context in (nullcontext, no_grad):
            with context():
                errors = refusals(several, lambda model=model: CONSUMERS[name](model(of(3, _IN)), labels))
            part = f"expected whole rows of {_OUT} columns, got this rank's {_OUT // several.size}"
            assert all(("" if gathers else part) in each and bool(each) != gathers for each in errors), errors


@pytest.mark.mpi(min_size=2)
def test_heads_and_layers_behind_a_divided_one_compare_their_own_columns(several):
    """What a rank may compute of its part: attention within its heads, and all behind the sum."""
    x = parallelize_module(Linear(_IN, _OUT, device=device()), several, ColumnParallel())(of(3, _IN))
    own = F.transpose(F.reshape(x, (3, 1, 1, -1)), (0, 2, 1, 3))
    F.softmax(F.matmul(own, own, transpose_b=True))
    whole = parallelize_module(Linear(_OUT, 4, device=device()), several, RowParallel())(F.relu(x))
    F.cross_entropy(whole, np.zeros(3, np.int32))
