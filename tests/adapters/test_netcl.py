"""netcl's modules as models: its own kernels run, and clcomm does everything around them."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("netcl", reason="netcl is not installed")

from clcomm.base.errors import ArgumentError
from clcomm.engine import no_grad
from clcomm.sync.adapters import adapter_of
from clcomm.sync.adapters.netcl import NetclAdapter, NetclModel, NetclTensor, cross_entropy, prepare
from clcomm.sync.adapters.netcl_runtime import _signal_handlers_kept
from tests.adapters.netcl_models import CLASSES, batch, make_model, reference


def assert_gradients(model, expected):
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        np.testing.assert_allclose(parameter.grad.numpy(), gradient, rtol=1e-4, atol=1e-6, err_msg=parameter.name)


def test_parameters_have_pytorchs_names_and_shapes():
    shapes = [(name, parameter.shape) for name, parameter in make_model().named_parameters()]
    assert shapes == [
        ("layers.0.weight", (5, 4)),
        ("layers.0.bias", (5,)),
        ("layers.2.weight", (3, 5)),
        ("layers.2.bias", (3,)),
    ]


def test_loss_and_gradients_are_those_of_float64():
    model, (x, y) = make_model(), batch()
    expected = reference(model, x, y)
    loss = cross_entropy(model(x), y)
    assert loss.item() == pytest.approx(expected.loss, rel=1e-5)
    loss.backward()
    assert_gradients(model, expected.gradients)


def test_weights_scale_and_further_batches_add():
    model, (x, y), (u, v) = make_model(), batch(), batch(rows=2, seed=1)
    cross_entropy(model(x), y).backward(0.75)
    cross_entropy(model(u), v).backward(0.25)
    parts = zip(reference(model, x, y).gradients, reference(model, u, v).gradients, strict=True)
    assert_gradients(model, [0.75 * a + 0.25 * b for a, b in parts])
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_second_backward_is_refused():
    model, (x, y) = make_model(), batch()
    loss = cross_entropy(model(x), y)
    loss.backward()
    with pytest.raises(ArgumentError, match="run forward"):
        loss.backward()


def test_nothing_is_recorded_under_no_grad():
    model, (x, y) = make_model(), batch()
    with no_grad():
        logits = model(x)
        loss = cross_entropy(logits, y)
    expected = reference(model, x, y)
    np.testing.assert_allclose(logits.numpy(), expected.logits, rtol=1e-4, atol=1e-5)
    assert loss.item() == pytest.approx(expected.loss, rel=1e-5)
    with pytest.raises(ArgumentError, match="backward"):
        loss.backward()


def test_the_batch_may_be_refilled_at_once():
    model, (x, y) = make_model(), batch()
    expected = reference(model, x, y)
    logits = model(x)
    x[:] = np.nan
    np.testing.assert_allclose(logits.numpy(), expected.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "labels, message",
    [
        (np.zeros(5, int), "expected 6 integers"),
        (np.zeros(6), "got float64"),
        (np.full(6, 3), "expected 0 to 2"),
        (np.full(6, -1), "expected 0 to 2"),
    ],
)
def test_labels_that_netcl_would_read_past_are_refused(labels, message):
    model, (x, _) = make_model(), batch()
    with pytest.raises(ArgumentError, match=message):
        cross_entropy(model(x), labels)


def test_parameters_and_gradients_go_through_the_flat_space(attach):
    model, (x, y) = make_model(), batch()
    values = {name: parameter.numpy() for name, parameter in model.named_parameters()}
    space = attach(adapter_of(model))
    space.adapter.pull_parameters()
    for name, value in values.items():
        np.testing.assert_array_equal(space.layout.view(space.arrays.params, name), value)
        space.layout.view(space.arrays.params, name)[...] = 2 * value
    space.adapter.push_parameters()
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(parameter.numpy(), 2 * values[name])
    cross_entropy(model(x), y).backward()
    expected = reference(model, x, y).gradients
    assert_gradients(model, expected)
    for bucket in space.buckets:
        space.adapter.pull_gradients(bucket)
    space.arrays.reduced.view(np.float32)[:] = 3 * space.arrays.grads.view(np.float32)
    for bucket in space.buckets:
        space.adapter.push_gradients(bucket)
    assert_gradients(model, [3 * gradient for gradient in expected])
    cross_entropy(model(x), y).backward()
    assert_gradients(model, [4 * gradient for gradient in expected])


def test_a_bare_netcl_module_is_a_model_too():
    model = make_model()
    assert adapter_of(model.module).specs == adapter_of(model).specs


def test_frozen_layers_and_buffers_are_extra_state():
    device = prepare()
    from netcl import nn

    def make():
        return NetclModel(nn.Sequential(nn.Conv2d(device.queue, 1, 2, 3), nn.BatchNorm2d(device.queue, 2)))

    model, other = make(), make()
    for each in (model, other):
        each.module.layers[0].freeze()
    adapter = NetclAdapter(model)
    state = adapter.extra_state()
    assert {"layers.0.weight", "layers.0.bias"} <= state.keys()
    assert any("running_mean" in name for name in state)
    assert not state.keys() & {spec.name for spec in adapter.specs}
    assert not np.array_equal(state["layers.0.weight"], other.state_dict()["layers.0.weight"])
    NetclAdapter(other).load_extra_state(state)
    for name, value in state.items():
        np.testing.assert_array_equal(other.state_dict()[name], value)


def test_state_goes_from_model_to_model_or_not_at_all():
    model, other = make_model(), make_model(seed=1)
    other.load_state_dict(model.state_dict())
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(other.state_dict()[name], value)
    wrong = {name: value + 1 for name, value in model.state_dict().items()}
    wrong["layers.2.bias"] = np.zeros(4)
    with pytest.raises(ArgumentError, match=r"'layers\.2\.bias' of shape \(3,\), got \(4,\)"):
        other.load_state_dict(wrong)
    wrong["layers.2.bias"] = np.array(["x"] * CLASSES)
    with pytest.raises(ArgumentError, match=r"'layers\.2\.bias' to hold numbers, got <U1"):
        other.load_state_dict(wrong)
    np.testing.assert_array_equal(other.state_dict()["layers.0.bias"], model.state_dict()["layers.0.bias"])


def test_modules_without_an_opencl_queue_or_parameters_are_refused():
    prepare()
    from netcl import nn

    with pytest.raises(ArgumentError, match="NumPy backend"):
        NetclModel(nn.Linear(None, 2, 2, device="cpu"))
    with pytest.raises(ArgumentError, match="got none"):
        NetclModel(nn.ReLU())


def test_netcl_takes_the_ranks_device_and_leaves_signals_alone():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    device = prepare("cpu")
    from netcl import nn

    assert nn.Linear(in_features=2, out_features=2).queue is device.queue
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    prepare()


@pytest.mark.parametrize("error", [None, RuntimeError("no device")])
@pytest.mark.parametrize("foreign", [(), (signal.SIGINT,), (signal.SIGTERM,), (signal.SIGINT, signal.SIGTERM)])
def test_signal_handlers_are_restored_after_an_error_and_beside_foreign_ones(monkeypatch, error, foreign):
    """`getsignal` returns None for a handler that C code has set, which Python cannot set again."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    real = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number in foreign else real(number))
    try:
        with pytest.raises(RuntimeError, match="no device") if error else nullcontext(), _signal_handlers_kept():
            for number in handlers:
                signal.signal(number, lambda *_: None)
            if error:
                raise error
        left = {number: real(number) for number in handlers}
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert {number: handler for number, handler in left.items() if number not in foreign} == {
        number: handler for number, handler in handlers.items() if number not in foreign
    }
    assert all(left[number] is not handlers[number] for number in foreign)


@pytest.mark.parametrize("shape", [(0, 4), (0,), (3, 0)])
def test_empty_batches_are_refused(shape):
    with pytest.raises(ArgumentError, match=r"model: expected a batch of at least one element, got shape"):
        make_model()(np.zeros(shape))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (3,), (2, 3, 4), ()])
def test_the_loss_refuses_logits_of_another_shape_or_without_elements(shape):
    logits = NetclTensor(SimpleNamespace(shape=shape))
    with pytest.raises(ArgumentError, match=r"logits: expected shape \(rows, classes\), at least one of each, got"):
        cross_entropy(logits, np.zeros(shape[:1], np.int64))


def test_programs_of_the_loss_are_built_once(monkeypatch):
    import pyopencl

    model, (x, y) = make_model(), batch()
    for _ in range(2):  # the second adds to the first one's gradients
        cross_entropy(model(x), y).backward()
    monkeypatch.setattr(pyopencl, "Program", None)  # building anything more would fail
    cross_entropy(model(x), y).backward()
