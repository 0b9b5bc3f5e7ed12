"""Tensor-parallel functions, layers and losses beside the whole ones, on any shape, device and transport."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.comm.transport import mpi_communicators
from clcomm.engine import Embedding, Linear, MultiheadAttention, Replay, Sequential, Tensor
from clcomm.engine import functional as F
from clcomm.engine.nn import Module, manual_seed
from clcomm.optim import SGD
from clcomm.parallel.tensor_parallel import (
    ColumnParallel,
    Exchange,
    HeadsParallel,
    RowParallel,
    VocabularyParallel,
    VocabularyParallelCrossEntropyLoss,
    copy_to_ranks,
    cross_entropy,
    gather_from_ranks,
    parallelize_module,
    reduce_from_ranks,
    reduce_scatter_to_ranks,
    scatter_to_ranks,
)
from tests.helpers import cpu_device, one_line
from tests.transport.references import pretended_host

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.fixture(params=["auto", "mpi", pytest.param("two hosts", marks=pytest.mark.mpi(min_size=3))])
def ranks(request, monkeypatch):
    """A Communicator with shared memory, without, and one that believes in two hosts."""
    if request.param == "two hosts":
        monkeypatch.setattr(mpi_communicators, "host_of", lambda comm: pretended_host("interleaved", comm))
    comm = Communicator(transport="mpi" if request.param == "mpi" else "auto")
    manual_seed(0)  # earlier tests may have drawn more on one rank
    yield comm
    if not request.node.has_failed:
        comm.finalize()


def drawn(seed, shape) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def of_ranks(comm, seed, shape) -> list[np.ndarray]:
    """Return what each rank draws; any rank can compute all."""
    return [drawn([seed, rank], shape) for rank in range(comm.size)]


def in_rank_order(arrays) -> np.ndarray:
    total = arrays[0].copy()
    for each in arrays[1:]:
        total += each
    return total


def has_bits(comm, values, expected) -> bool:
    """Compare bits; several hosts add up in another order."""
    if comm.hosts > 1:
        return np.allclose(values, expected, rtol=1e-5, atol=1e-6)
    return values.tobytes() == np.ascontiguousarray(expected).tobytes()


def shapes(comm, count=12):
    """Yield (shape, axis) whose axis the ranks divide: blocks of whole cache lines and others, few and many rows."""
    rng = np.random.default_rng(comm.size)
    yield (comm.size,), 0
    yield (3, 32 * comm.size, 8), -2
    for _ in range(count):
        shape = rng.integers(1, 9, rng.integers(1, 5)).tolist()
        axis = int(rng.integers(-len(shape), len(shape)))
        shape[axis] *= comm.size
        yield tuple(shape), axis


def part_of(whole, axis, comm) -> np.ndarray:
    return np.split(whole, comm.size, axis)[comm.rank]


CASES = {
    # name: (function of x, whether x is a part, result and gradient by the ranks' x and result gradients)
    "copy": (lambda x, e, axis: copy_to_ranks(x, e), False, lambda xs, c, a: xs[c.rank],
             lambda gs, c, a: in_rank_order(gs)),
    "reduce": (lambda x, e, axis: reduce_from_ranks(x, e), False, lambda xs, c, a: in_rank_order(xs),
               lambda gs, c, a: gs[c.rank]),
    "scatter": (scatter_to_ranks, False, lambda xs, c, a: part_of(xs[c.rank], a, c),
                lambda gs, c, a: np.concatenate(gs, a)),
    "gather": (gather_from_ranks, True, lambda xs, c, a: np.concatenate(xs, a),
               lambda gs, c, a: part_of(gs[c.rank], a, c)),
    "gather, sums": (lambda x, e, axis: gather_from_ranks(x, e, axis, sums=True), True,
                     lambda xs, c, a: np.concatenate(xs, a), lambda gs, c, a: part_of(in_rank_order(gs), a, c)),
    "reduce-scatter": (reduce_scatter_to_ranks, False, lambda xs, c, a: part_of(in_rank_order(xs), a, c),
                       lambda gs, c, a: np.concatenate(gs, a)),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_have_the_bits_of_sums_in_rank_order(ranks, name, kind):
    function, takes_part, result_of, gradient_of = CASES[name]
    device = cpu_device(kind)
    exchange = Exchange(ranks, device)
    for number, (shape, axis) in enumerate(shapes(ranks)):
        xs = of_ranks(ranks, number, shape)
        if takes_part:
            xs = [np.split(each, ranks.size, axis)[0] for each in xs]
        x = Tensor(xs[ranks.rank], device, requires_grad=True)
        y = function(x, exchange, axis)
        expected = result_of(xs, ranks, axis)
        assert has_bits(ranks, y.numpy(), expected), (shape, axis)
        gradients = of_ranks(ranks, number + 100, y.shape)
        y.backward(Tensor(gradients[ranks.rank], device))
        expected = gradient_of(gradients, ranks, axis)
        assert has_bits(ranks, x.grad.numpy(), expected), (shape, axis)


@pytest.mark.parametrize("order", list(itertools.permutations(["gather", "reduce-scatter", "reduce"])), ids="-".join)
def test_exchanges_in_any_order_do_not_overwrite_what_other_ranks_read(ranks, order):
    """Ranks run ahead of each other, each in turn, between exchanges of all kinds."""
    device = cpu_device("cpu")
    exchange, shape = Exchange(ranks, device), (64 * ranks.size, 24)
    results, expected = [], []
    for number in range(24):
        name = order[number // 2 % 3]
        function, takes_part, result_of, _ = CASES[name]
        xs = of_ranks(ranks, number, shape)
        xs = [np.split(each, ranks.size, 0)[0] for each in xs] if takes_part else xs
        results.append(function(Tensor(xs[ranks.rank], device), exchange, 0))
        expected.append(result_of(xs, ranks, 0))
        if number % ranks.size == ranks.rank:  # a late rank
            device.finish()
            np.linalg.inv(np.eye(60) + 1.0)
    for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert has_bits(ranks, result.numpy(), wanted), number


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_replays_exchange_the_inputs_of_each_call(ranks, kind):
    device = cpu_device(kind)
    exchange = Exchange(ranks, device)
    weight = Linear(4, 4, device=device)
    weight.flat_space()

    def step(x: Tensor) -> Tensor:
        y = reduce_scatter_to_ranks(gather_from_ranks(weight(x), exchange, 0, sums=True), exchange, 0)
        z = reduce_from_ranks(copy_to_ranks(y, exchange), exchange)
        z.sum().backward()
        return z

    run, plain = Replay(step), []
    for number in range(8):
        x = Tensor(drawn([number, ranks.rank], (3, 4)), device)
        got = run(x).numpy(), weight.weight.grad.numpy()
        weight.zero_grad()
        plain.append(step(x).numpy())
        assert np.array_equal(got[0], plain[-1])
        assert np.array_equal(got[1], weight.weight.grad.numpy())
        weight.zero_grad()
    assert run.replayed >= 5
    assert run.refusal is None


@pytest.mark.parametrize(("function", "name"), [(scatter_to_ranks, "scatter_to_ranks"),
                                                (reduce_scatter_to_ranks, "reduce_scatter_to_ranks")])  # fmt: skip
def test_sizes_that_the_ranks_do_not_divide_are_refused_with_the_numbers(several, function, name):
    exchange = Exchange(several, cpu_device("cpu"))
    x = Tensor(np.zeros((2, several.size + 1), np.float32), cpu_device("cpu"))
    with pytest.raises(ArgumentError, match=rf"^{name}: expected a dimension 1 that {several.size} ranks divide") as e:
        function(x, exchange)
    one_line(e)
    for call in (function, gather_from_ranks):
        with pytest.raises(ArgumentError, match="axis 2 does not fit"):
            call(x, exchange, 2)


# --- layers ---


def compared(comm, whole: Module, plan, *inputs, part_of_output=None) -> None:
    """Compare a divided module's result and all gradients with those of the whole one."""
    whole.zero_grad()
    divided = parallelize_module(copy.deepcopy(whole), comm, plan)
    gradient = drawn([comm.size, 7], whole(*inputs).shape)
    for model in (whole, divided):
        given = [Tensor(each.numpy(), each.device, each.dtype == np.float32) for each in inputs]
        result = model(*given)
        assert result.numpy().shape == gradient.shape
        result.backward(Tensor(gradient, result.device))
        if model is whole:
            expected = (
                result.numpy(),
                [None if each.grad is None else each.grad.numpy() for each in given],
                {name: parameter.grad.numpy() for name, parameter in model.named_parameters()},
            )
    close = {"rtol": 2e-4, "atol": 2e-5}
    assert np.allclose(result.numpy(), expected[0], **close)
    for each, wanted in zip(given, expected[1], strict=True):
        assert each.grad is None if wanted is None else np.allclose(each.grad.numpy(), wanted, **close)
    for name, parameter in divided.named_parameters():
        own = parameter.grad.numpy()
        whole_gradient = own if parameter.part is None else parameter.part.gather(own)
        assert np.allclose(whole_gradient, expected[2][name], **close), name


@pytest.mark.sampled(20)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(3, 1, 2), (40, 3, 7), (2, 70, 33), (130, 8, 16)])
def test_linear_layers_compute_what_the_whole_one_does(ranks, sizes, bias, kind):
    rows, each_in, each_out = sizes
    device = cpu_device(kind)
    layer = Linear(each_in * ranks.size, each_out * ranks.size, bias=bias, device=device)
    for shape in ((rows,), (2, rows)):
        x = Tensor(drawn(rows, (*shape, each_in * ranks.size)), device)
        compared(ranks, layer, ColumnParallel(gather_output=True), x)
        compared(ranks, layer, RowParallel(split_input=True), x)


@pytest.mark.parametrize("padding_idx", [None, 0, -1, 3])
def test_embeddings_have_the_bits_of_the_whole_one(ranks, padding_idx):
    device = cpu_device("cpu")
    whole = Embedding(5 * ranks.size, 7, padding_idx, device=device)
    tokens = np.random.default_rng(1).integers(0, 5 * ranks.size, (4, 9)).astype(np.int32)
    compared(ranks, whole, VocabularyParallel(), Tensor(tokens, device))
    expected = whole(Tensor(tokens, device)).numpy()
    divided = parallelize_module(whole, ranks, VocabularyParallel())
    assert np.array_equal(divided(tokens).numpy(), expected)
    with pytest.raises(ArgumentError, match=f"expected 0 to {5 * ranks.size - 1}, got {5 * ranks.size}"):
        divided(np.array([5 * ranks.size]))


@pytest.mark.parametrize("use", ["step", "gradient", "loss", "replay"])
def test_a_token_outside_that_the_device_alone_knows_is_named_on_every_rank(ranks, use):
    """It adds to no gradient, and each rank's rows have finite ones: what would tell of it is no number."""
    device, count = cpu_device("cpu"), 5 * ranks.size
    table = parallelize_module(Embedding(count, 3, device=device), ranks, VocabularyParallel())
    optimizer = SGD(table, 0.1)

    def loss_of(tokens):
        loss = table(F.to_int(tokens)).sum()
        loss.backward()
        return loss

    of_step = Replay(loss_of) if use == "replay" else loss_of

    def used(*tokens: int) -> None:
        optimizer.zero_grad()
        loss = of_step(Tensor(np.array(tokens, np.float32), device))
        if use == "gradient":
            table.weight.grad.numpy()
        elif use == "loss":
            loss.item()
        else:
            optimizer.step()

    for outside in (count, -1):
        for step in range(12 if use == "replay" else 1):
            used(step % count, count - 1)
        before = table.weight.numpy()
        with pytest.raises(ArgumentError) as caught:
            used(0, outside)
        assert ranks.all_gather_object(one_line(caught)) == [
            f"index: expected 0 to {count - 1}, got {outside}"
        ] * ranks.size  # fmt: skip
        assert np.array_equal(table.weight.numpy(), before)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_computes_what_the_whole_one_does(ranks, bias, is_causal):
    device, heads = cpu_device("cpu"), 2 * ranks.size
    whole = MultiheadAttention(heads * 3, heads, bias=bias, batch_first=True, device=device)

    class Causal(Module):
        def __init__(self, inner):
            self.inner = inner

        def forward(self, *inputs):
            return self.inner(*inputs, need_weights=False, is_causal=is_causal)[0]

    plan = {"inner": HeadsParallel()}
    q, k, v = (Tensor(drawn(n, (2, 5, heads * 3)), device) for n in range(3))
    compared(ranks, Causal(whole), plan, q)
    compared(ranks, Causal(whole), plan, q, k, v)


# --- the loss ---


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [None, 2, -100])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_loss_of_parts_is_that_of_the_whole(ranks, kind, reduction, ignored, smoothing, scale):
    device, rng = cpu_device(kind), np.random.default_rng(3)
    exchange = Exchange(ranks, device)
    for rows, each in ((1, 1), (7, 5), (40, 19)):
        classes = each * ranks.size
        x = drawn(rows, (rows, classes)) * np.float32(scale)
        targets = rng.integers(0, classes, rows).astype(np.int32)
        if ignored is not None:
            targets[::3] = ignored if ignored < classes else targets[::3]
        own = Tensor(x[:, ranks.rank * each : (ranks.rank + 1) * each], device, requires_grad=True)
        loss = cross_entropy(own, targets, exchange, reduction, ignore_index=ignored, label_smoothing=smoothing)
        gradient = drawn(rows, loss.shape)
        loss.backward(Tensor(gradient, device))
        x64, counted = x.astype(np.float64), np.ones(rows, bool) if ignored is None else targets != ignored
        logs = np.logaddexp.reduce(x64, 1)
        mixed = np.full(x.shape, smoothing / classes)
        mixed[np.arange(rows), np.where(counted, targets, 0)] += 1 - smoothing
        losses = np.where(counted, logs - (mixed * x64).sum(1), 0)
        with np.errstate(invalid="ignore"):
            divisor = np.float64(counted.sum()) if reduction == "mean" else 1.0
            expected = losses if reduction == "none" else losses.sum() / divisor
            factor = counted * gradient / divisor
        close = {"rtol": 1e-4, "atol": 2e-6 * scale, "equal_nan": True}
        assert np.allclose(loss.numpy(), expected, **close)
        wanted = np.exp(x64 - logs[:, None]) - mixed
        wanted = np.where(counted[:, None], wanted * factor[:, None], 0)[:, ranks.rank * each : (ranks.rank + 1) * each]
        assert np.allclose(own.grad.numpy(), wanted, rtol=1e-3, atol=2e-6 * max(1, scale / 100), equal_nan=True)
        same = ranks.all_gather_object(loss.numpy().tobytes())
        assert len(set(same)) == 1


def test_the_loss_as_a_module_takes_any_leading_dimensions(ranks):
    device, each = cpu_device("cpu"), 4
    x = drawn(0, (2, 3, each * ranks.size))
    targets = np.random.default_rng(0).integers(0, each * ranks.size, (2, 3)).astype(np.int32)
    own = Tensor(np.split(x, ranks.size, -1)[ranks.rank], device)
    loss = VocabularyParallelCrossEntropyLoss(ranks)(own, Tensor(targets, device)).item()
    whole = F.cross_entropy(Tensor(x.reshape(6, -1), device), targets.reshape(-1)).item()
    assert loss == pytest.approx(whole, rel=1e-5)
    for wrong, message in (
        (targets[:1], "expected targets of shape"),
        (targets.astype(np.float32), "expected integers"),
        (targets + each * ranks.size, f"expected 0 to {each * ranks.size - 1}"),
    ):
        with pytest.raises(ArgumentError, match=message) as caught:
            VocabularyParallelCrossEntropyLoss(ranks)(own, wrong)
        one_line(caught)
    with pytest.raises(ArgumentError, match=r"expected label_smoothing from 0 to 1, got 1\.5"):
        VocabularyParallelCrossEntropyLoss(ranks, label_smoothing=1.5)
    values = np.full((2, 3), each * ranks.size, np.int32)
    message = f"0 to {each * ranks.size - 1}, got {each * ranks.size}"
    with pytest.raises(ArgumentError, match=message):
        VocabularyParallelCrossEntropyLoss(ranks)(own, Tensor(values, device))
    loss = VocabularyParallelCrossEntropyLoss(ranks)(own, Tensor(values, device, copy=False))
    with pytest.raises(ArgumentError, match=message):
        loss.item()


def test_layers_of_other_names_stay_as_they_are(ranks):
    device = cpu_device("cpu")
    model = Sequential(Linear(4, 4 * ranks.size, device=device), Linear(4 * ranks.size, 4, device=device))
    second = model[1]
    parallelize_module(model, ranks, {"0": ColumnParallel(gather_output=True)})
    assert model[1] is second
