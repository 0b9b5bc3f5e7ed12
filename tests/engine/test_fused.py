"""Fused functions: the bits of the function by itself, forward and backward; kernels, programs, errors."""

from __future__ import annotations

import re

import numpy as np
import pytest

from clcomm import as_torch as torch_names
from clcomm.base.errors import ArgumentError
from clcomm.engine import Linear, Module, Parameter, Replay, Tensor, autograd, fusion, no_grad
from clcomm.engine import functional as F
from clcomm.engine.fusion import fused, stages
from clcomm.engine.gradients import grad
from clcomm.engine.recomputation import checkpoint
from tests.sampling import some
from training.engines.rehearsal import Rehearsal

#: The operands' shapes, which broadcast to the first's: two of it, a row, a column, a channel, an element.
SHAPES = ((5, 3, 7), (5, 3, 7), (7,), (5, 1, 1), (3, 1), (1,))
FORMS = (
    "({} + {})", "({} - {})", "({} * {})", "({} / (F.square({}) + 1))", "({} * 0.7)", "(1.5 - {})",
    "(2 / (F.abs({}) + 1))",
    "F.exp(-F.abs({}))", "F.log(F.square({}) + 0.5)", "F.sqrt(F.square({}) + 1)", "F.rsqrt(F.square({}) + 1)",
    "F.pow(F.square({}) + 1, 1.5)", "(({}) ** 3)", "F.clamp({}, -0.5, 1.0)", "F.sin({})", "F.cos(3000 * {})",
    "F.erf({})",
    "F.tanh({})", "F.sigmoid({})", "F.relu({})", "F.gelu({})", "F.gelu({}, approximate='tanh')", "F.silu({})",
    "F.leaky_relu({}, 0.2)", "F.elu({}, 0.5)", "F.softplus({}, 2.0)", "F.mish({})", "F.hardswish({})", "F.hardtanh({})",
    "F.hardsigmoid({})", "F.logsigmoid({})", "F.threshold({}, 0.1, 0.3)", "F.log1p(F.abs({}))", "F.maximum({}, {})",
    "F.minimum({}, {})", "F.where({} > {}, {}, {})", "F.where(({} <= 0.3) & ~({} == {}), {}, 0.25)",
    "F.masked_fill({}, {} < 0, 0.5)", "F.sign({})", "F.floor(2 * {})", "({} % 0.7)", "({} > 0).float()",
    "({}.detach() * {})", "F.expm1(-F.abs({}))", "F.atan({})", "F.pow(F.square({}) + 1, {})",
    "F.celu({}, 0.7)", "F.selu({})", "F.hardshrink({}, 0.3)", "F.softshrink({}, 0.3)",
)  # fmt: skip


def drawn(rng: np.random.Generator, forms: int) -> str:
    """Return an expression of some forms over the operands, of which the first enters whole."""
    parts = ["x0", *(f"x{n}" for n in range(len(SHAPES)))]
    for _ in range(forms):
        form = FORMS[rng.integers(len(FORMS))]
        chosen = [parts[-1], *(parts[rng.integers(len(parts))] for _ in range(form.count("{}") - 1))]
        whole = form.format(*(f"(x0 * 1 + {each})" if each in ("x2", "x3", "x4", "x5") else each for each in chosen))
        parts.append(whole)
        if len(parts[-1]) > 600:
            break
    return f"({parts[-1]} + x0) * x1 + x{rng.integers(len(SHAPES))}"


def function_of(text: str):
    return eval(f"lambda {', '.join(f'x{n}' for n in range(len(SHAPES)))}: {text}", {"F": F})


def results(function, hosts, device, needs=None, twice=False):
    """Return the function's result and its gradients, also added to what leaves and results have got before."""
    xs = [Tensor(host, device, requires_grad=needs is None or n in needs) for n, host in enumerate(hosts)]
    whole = [x * 1.25 if n % 2 else x for n, x in enumerate(xs)]  # results among the arguments
    y = function(*whole)
    total = y
    if twice:  # others use the arguments, before it and after it
        for x in whole:
            total = total * x + F.exp(x * 0.1)
    weights = np.random.default_rng(5).standard_normal(total.shape).astype(np.float32)
    if total.requires_grad:
        total.backward(Tensor(weights, device))
    return [y.numpy(), *(None if x.grad is None else x.grad.numpy() for x in xs)], y


def same(one, other) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or a.tobytes() == b.tobytes())
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("seed", some(range(60), 12))
@pytest.mark.parametrize("twice", (False, True))
def test_drawn_expressions_have_the_bits_of_the_functions_alone(device, seed, twice):
    rng = np.random.default_rng(seed)
    text = drawn(rng, int(rng.integers(1, 9)))
    hosts = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    needs = None if seed % 3 else set(rng.permutation(len(SHAPES))[:2])
    function = function_of(text)
    expected, _ = results(function, hosts, device, needs, twice)
    actual, _ = results(fused(function), hosts, device, needs, twice)
    assert same(actual, expected), text


def test_planted_faults_change_bits(device, monkeypatch):
    """What the comparisons above rest on: each of these is seen by them."""

    def function(x, y):
        return F.sin(1e10 * (x == 0).float() + (20000.0 + 1000.0 * x * y)) - x * y

    drawn_hosts = [[np.random.default_rng(seed).standard_normal(71).astype(np.float32)] * 2 for seed in range(9)]
    expected = [results(function, hosts, device, twice=True)[0] for hosts in drawn_hosts]

    def is_seen():
        own = fused(function)
        return not all(same(results(own, hosts, device, twice=True)[0], each)
                       for hosts, each in zip(drawn_hosts, expected, strict=True))  # fmt: skip

    assert not is_seen()
    for owner, name, value in (
        (stages, "_LITERAL", {"-1.0": "1.0f"}),  # another number
        (stages, "_OF_ALL_LANES", re.compile("(?!)")),  # the function sees lanes beyond the end
        (autograd.Context, "taken", lambda self, index: None),  # gradients are added in another order
    ):
        if name == "_OF_ALL_LANES" and not device.is_cpu:
            continue  # one lane
        with monkeypatch.context() as planted:
            planted.setattr(owner, name, value)
            assert is_seen(), name


@pytest.mark.parametrize(
    ("function", "reference", "shapes"),
    [
        (lambda x: x * F.sigmoid(1.702 * x), lambda x: x / (1 + np.exp(-1.702 * x)), [(9, 11)]),
        (lambda x, b, g: g * F.tanh(x + b) + x, lambda x, b, g: g * np.tanh(x + b) + x, [(6, 13), (13,), (13,)]),
        (lambda x, y: F.mean(F.where(F.abs(x - y) <= 1, 0.5 * F.square(x - y), F.abs(x - y) - 0.5)),
         lambda x, y: np.mean(np.where(abs(x - y) <= 1, 0.5 * (x - y) ** 2, abs(x - y) - 0.5)), [(5, 7), (5, 7)]),
        (lambda x, g: x * F.rsqrt(F.mean(F.square(x), -1, True) + 1e-5) * g,
         lambda x, g: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * g, [(4, 10), (10,)]),
    ],
)  # fmt: skip
def test_values_and_gradients_are_those_of_float64(check_op, function, reference, shapes):
    rng = np.random.default_rng(1)
    check_op(fused(function), reference, *(rng.uniform(0.5, 2, shape).astype(np.float32) for shape in shapes),
             tolerance=5e-6)  # fmt: skip


def gelu(x, b):
    u = x + b
    return 0.5 * u * (1 + F.tanh(0.79788456 * (u + 0.044715 * u**3)))


def launched(device, run) -> list[str]:
    names: list[str] = []
    device.note = lambda launch: names.append(launch[0].function_name)
    try:
        run()
    finally:
        device.note = None
    return names


def test_a_chain_is_one_kernel_each_way_and_20_shapes_share_it(device):
    function, before = fused(gelu), len(device._programs)
    for n in range(1, 21):
        x = Tensor(np.ones((n + 1, 5 + n), np.float32), device, requires_grad=True)
        b = Tensor(np.ones(5 + n, np.float32), device)
        seed = Tensor(np.ones(x.shape, np.float32), device)
        assert launched(device, lambda x=x, b=b, seed=seed: function(x, b).backward(seed)) == ["fused", "fused"]
    built = [key for key in list(device._programs)[before:] if str(key[0]).startswith("fused")]
    assert len(built) <= 4  # of whole vectors, and of others


def test_more_programs_than_a_function_may_have_are_not_built(device, monkeypatch):
    monkeypatch.setitem(fused.__globals__, "_MOST_PROGRAMS", 2)
    function, before = fused(lambda x, power: x**power + x), len(device._programs)
    x = Tensor(np.full(9, 1.5, np.float32), device)
    for power in (1.5, 2.0, 3.0, 0.5, -0.5):
        np.testing.assert_allclose(function(x, power).numpy(), 1.5**power + 1.5, rtol=1e-6)
    assert len([key for key in list(device._programs)[before:] if str(key[0]).startswith("fused")]) <= 2


def test_an_argument_given_twice_a_mask_names_and_methods(device):
    class Scaled:
        scale = 2.0

        @fused
        def of(self, x, y, *, mask=None, name="z"):
            return F.where(mask, x * y, x) * self.scale

    host = np.linspace(-1, 1, 21, dtype=np.float32)
    x, scaled = Tensor(host, device, requires_grad=True), Scaled()
    y = scaled.of(x, x, mask=Tensor(host > 0, device))
    y.sum().backward()
    np.testing.assert_array_equal(y.numpy(), np.where(host > 0, host * host, host) * 2)
    np.testing.assert_array_equal(x.grad.numpy(), np.where(host > 0, host * 2, 1) * 2)
    scaled.scale = 3.0  # a value that the function reads by name
    np.testing.assert_array_equal(scaled.of(x, x, mask=Tensor(host > 0, device)).numpy(),
                                  np.where(host > 0, host * host, host) * np.float32(3))  # fmt: skip
    outer = fused(lambda x: fused(gelu)(x, x) * 2)
    assert launched(device, lambda: outer(x)) == ["fused"]  # and not two
    assert outer(x).numpy().tobytes() == (gelu(x, x) * 2).numpy().tobytes()
    flags = fused(lambda x, y: (x > 0) & (y < 0.5))(x, x)
    np.testing.assert_array_equal(flags.numpy(), (host > 0) & (host < 0.5))


#: The engine's own functions that are fused.
CHAINED = (
    "F.prelu(x0, x2[:1]) * x1", "F.rms_norm(x0, (3, 7), None, 1e-3)", "F.rms_norm(x0, 7, x2)",
    "F.l1_loss(x0, x1)", "F.binary_cross_entropy(F.sigmoid(x0), F.sigmoid(x1), reduction='sum')",
    "F.kl_div(x0, F.sigmoid(x1))", "F.kl_div(x0, x1, reduction='batchmean', log_target=True)",
    "F.softsign(x0)", "F.tanhshrink(x0)", "F.lerp(x0, x2, 0.3)",
    "F.lerp(x0, x2, x3)", "F.addcmul(x0, x2, x1, value=0.5)", "F.addcdiv(x0, x1, x1 * x1 + 1)", "F.logaddexp(x0, x1)",
    "F.tan(x0)", "F.sinh(x0)", "F.cosh(x0)", "F.nan_to_num(x0 / (x1 > 0).float())",
    "F.margin_ranking_loss(x0, x1, F.sign(x0))", "F.hinge_embedding_loss(x0, F.sign(x1))",
    "F.soft_margin_loss(x0, F.sign(x1))", "F.poisson_nll_loss(x0, 3 * x1 * x1, full=True)",
    "F.gaussian_nll_loss(x0, x1, x1 * x1 + 0.1, True)",
)  # fmt: skip


@pytest.mark.parametrize("text", CHAINED)
def test_the_engines_own_chains_have_the_bits_of_their_operations(device, text):
    hosts = [np.random.default_rng(n).standard_normal(shape).astype(np.float32) for n, shape in enumerate(SHAPES)]
    function = function_of(text)
    chained = launched(device, lambda: results(function, hosts, device))
    found, _ = results(function, hosts, device, twice=True)
    with fusion.one_by_one():
        assert same(results(function, hosts, device, twice=True)[0], found)
        alone = launched(device, lambda: results(function, hosts, device))
    assert "fused" in chained and "fused" not in alone and len(chained) <= len(alone)


def test_a_rehearsal_lists_the_programs_of_fused_functions(device):
    function = fused(lambda x: F.tanh(x) * 0.25 + x)
    rehearsal = Rehearsal(device)
    own = Tensor(np.ones(9, np.float32), rehearsal, requires_grad=True)
    function(own).backward(Tensor(np.ones(9, np.float32), rehearsal))
    rehearsal.build(rehearsal.programs)
    built = len(device._programs)
    x = Tensor(np.ones(9, np.float32), device, requires_grad=True)
    assert launched(device, lambda: function(x).backward(Tensor(np.ones(9, np.float32), device))) == ["fused"] * 2
    assert len(device._programs) == built
    rehearsal.close()


def test_tensors_without_elements_have_the_functions_result(device):
    x = Tensor(np.ones((0, 3), np.float32), device, requires_grad=True)
    result = fused(gelu)(x, Tensor(np.ones(3, np.float32), device))
    assert result.shape == (0, 3) and result.numpy().shape == (0, 3)


def test_modes_of_the_tape(device):
    host = np.linspace(0.5, 2, 19, dtype=np.float32)
    function = fused(lambda x, y: F.exp(x) * y + x * x)
    with no_grad():
        assert not function(*[Tensor(host, device, requires_grad=True)] * 2).requires_grad
    assert not fused(lambda x: F.exp(x.detach()) * 2)(Tensor(host, device, requires_grad=True)).requires_grad
    x, y = (Tensor(host, device, requires_grad=True) for _ in "xy")
    result = function(x, y)
    x.copy_from(host * 2)
    with pytest.raises(ArgumentError, match=r"backward: Fused kept a tensor of shape \(19,\), which was overwritten"):
        result.backward(Tensor(host, device))
    fused(lambda x, y: x * 2 + y)(x, y).sum().backward()  # backward reads no argument
    seconds = []
    for each in (function, lambda x, y: F.exp(x) * y + x * x):
        x, y = (Tensor(host, device, requires_grad=True) for _ in "xy")
        (first,) = grad((each(x, y) * x).sum(), x)
        (found,) = grad(each(x, y).sum(), x, create_graph=True)
        (found * found).sum().backward()
        own = Tensor(host, device, requires_grad=True)
        checkpoint(lambda x, each=each: each(x, x * 2) * x, own).sum().backward()
        seconds.append([first.numpy(), x.grad.numpy(), y.grad.numpy(), own.grad.numpy()])
    assert same(*seconds)


def test_a_replay_of_fused_functions_has_the_same_bits(device):
    outcomes = []
    for each in (fused(gelu), gelu):
        bias = Parameter(np.linspace(-1, 1, 8, dtype=np.float32), device)
        module = type("Act", (Module,), {"forward": lambda self, x, each=each: each(x, self.bias)})()
        module.bias = bias
        module.flat_space()
        step = Replay(lambda x, module=module: module(x).sum().backward())
        for n in range(5):
            step(Tensor(np.random.default_rng(n).standard_normal((6, 8)).astype(np.float32), device))
        assert step.replayed >= 2 and step.refusal is None
        outcomes.append([bias.grad.numpy()])
    assert same(*outcomes)


REFUSED = {
    "matmul": (lambda x: F.matmul(x, x), "queues the kernel .* of gemm"),
    "softmax": (lambda x: F.softmax(x, -1), "softmax.cl"),
    "value": (lambda x: x * x.sum().item(), "brings values to the host"),
    "condition": (lambda x: x if (x > 0).any() else -x, "queues the kernel|brings values"),
    "upload": (lambda x: x + Tensor(np.ones(4, np.float32)), "one device, got none \\(of .*fused: give it all tensors"),
    "dropout": (lambda x: F.dropout(x, 0.5), "dropout|brings values"),
    "in place": (lambda x: x.add_(1.0) * 2, "writes to an argument in place"),
    "several": (lambda x: (x * 2, x * 3), "returns a tuple"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_fused_is_one_error_at_the_first_call(device, name):
    function, pattern = REFUSED[name]
    host = np.ones((4, 4), np.float32)
    x = Tensor(host, device, requires_grad=name != "in place")
    with pytest.raises(ArgumentError, match=pattern) as raised:
        fused(function)(x)
    assert "\n" not in str(raised.value)
    np.testing.assert_array_equal(x.numpy(), host)


GENERATOR = np.random.default_rng(0)


def test_random_numbers_and_unhashable_arguments_are_refused(device):
    x = Tensor(np.ones(4, np.float32), device)
    with pytest.raises(ArgumentError, match="depends on the state of GENERATOR"):
        fused(lambda x: x * GENERATOR.random())(x)
    numbers = iter(range(9)).__next__
    with pytest.raises(ArgumentError, match="depends on"):
        fused(lambda x: x * numbers())(x)
    with pytest.raises(ArgumentError, match="expected tensors and hashable values"):
        fused(lambda x, y: x * y[0])(x, [1.0])
    with pytest.raises(ArgumentError, match="expected a function, got int"):
        fused(3)


def test_pytorchs_names_for_compilers():
    calls = []

    @torch_names.jit.script
    def product(x, y):
        return F.matmul(x, y) * 2

    @torch_names.jit.script
    def chain(x):
        return x * F.sigmoid(x)

    @torch_names.compile
    def step(x):
        calls.append(x)
        return x

    x = Tensor(np.full((3, 3), 2.0, np.float32))
    np.testing.assert_array_equal(product(x, x).numpy(), np.full((3, 3), 24))
    assert launched(x.device, lambda: chain(x)) == ["fused"]
    assert torch_names.compile(mode="default")(step) is step and len([step(x), *calls]) == 2
    layer = Linear(3, 3)
    assert torch_names.compile(layer) is layer is torch_names.jit.script(layer)
