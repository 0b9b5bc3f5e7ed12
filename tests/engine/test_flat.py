"""The flat space: one place per parameter, gradient states, host arrays beneath it."""

from __future__ import annotations

import gc
import mmap
import weakref

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Conv2d, FlatSpace, Linear, Parameter, ReLU, Sequential, Tensor
from clcomm.engine import functional as F
from clcomm.engine.grad_slot import LOCAL, NONE, REDUCED


def page_aligned(nbytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)[:nbytes]


def host_arrays(space: FlatSpace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    params, grads, reduced = (page_aligned(space.layout.span) for _ in range(3))
    return params, grads, reduced


@pytest.fixture
def model(device):
    return Sequential(Linear(7, 5, device=device), ReLU(), Linear(5, 3, device=device))


def run_backward(model: Sequential, device, seed: int = 0) -> None:
    x = np.random.default_rng(seed).standard_normal((4, 7)).astype(np.float32)
    F.cross_entropy(model(Tensor(x, device)), np.array([0, 1, 2, 0])).backward()


def gradients(model: Sequential) -> dict[str, np.ndarray]:
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)


def flat_space_of(parameters) -> FlatSpace:
    return FlatSpace((str(index), parameter) for index, parameter in enumerate(parameters))


def flat_host(space: FlatSpace, buffer) -> np.ndarray:
    out = np.empty(space.layout.span, np.uint8)
    space.device.read(buffer, out)
    return out


def test_parameters_keep_their_values_and_lie_in_reverse_order(model):
    before = model.state_dict()
    space = model.flat_space()
    assert model.flat_space() is space
    assert [place.name for place in space.layout.ranges] == ["2.bias", "2.weight", "0.bias", "0.weight"]
    assert_same(model.state_dict(), before)
    flat = flat_host(space, space.params)
    assert all(np.array_equal(space.layout.view(flat, name), value) for name, value in before.items())
    own = sum(value.nbytes for value in before.values())
    assert space.layout.nbytes == own and np.count_nonzero(flat) <= own


def test_backward_writes_into_the_flat_gradients(model, device):
    run_backward(model, device)
    expected = gradients(model)
    model.zero_grad()
    space = model.flat_space()
    assert gradients(model) == {} and [s.state for s in space.slots] == [NONE] * 4
    run_backward(model, device)
    assert_same(gradients(model), expected)
    flat = flat_host(space, space.grads)
    assert all(space.layout.view(flat, n).tobytes() == g.tobytes() for n, g in expected.items())


def test_gradients_from_before_flattening_are_kept(model, device):
    run_backward(model, device)
    expected = gradients(model)
    model.flat_space()
    assert_same(gradients(model), expected)


def test_accumulation_is_the_same_with_and_without_a_flat_space(model, device):
    for seed in (1, 2, 3):
        run_backward(model, device, seed)
    expected = gradients(model)
    model.zero_grad()
    model.flat_space()
    for seed in (1, 2, 3):
        run_backward(model, device, seed)
    assert_same(gradients(model), expected)


def test_a_parameter_used_twice_and_one_as_both_inputs(device):
    w = Parameter([2.0, 3.0], device)
    space = flat_space_of([w])
    (w * w + w).sum().backward()
    assert w.grad.numpy().tolist() == [5, 7]
    assert space.layout.view(flat_host(space, space.grads), "0").tolist() == [5, 7]


def test_a_gradient_of_nan_reaches_the_flat_buffer(model, device):
    space = model.flat_space()
    F.cross_entropy(model(Tensor(np.full((4, 7), np.nan), device)), np.array([0, 1, 2, 0])).backward()
    flat = flat_host(space, space.grads)
    assert all(np.isnan(space.layout.view(flat, name)).all() for name in ("0.weight", "2.bias"))


def test_rebind_keeps_contents_and_sees_what_happens_after(model, device):
    space = model.flat_space()
    run_backward(model, device, 1)
    values, before = model.state_dict(), gradients(model)
    params, grads, reduced = host_arrays(space)
    space.rebind(params, grads, reduced)
    assert_same(model.state_dict(), values)
    assert_same(gradients(model), before)
    space.pull_params()
    space.moves.pull(0, space.layout.span)
    for name in values:
        assert space.layout.view(params, name).tobytes() == values[name].tobytes()
        assert space.layout.view(grads, name).tobytes() == before[name].tobytes()
    model.zero_grad()
    run_backward(model, device, 2)
    space.moves.pull(0, space.layout.span)
    assert_same({n: space.layout.view(grads, n).copy() for n in values}, gradients(model))


def test_host_parameters_become_the_devices(model):
    space = model.flat_space()
    params, grads, reduced = host_arrays(space)
    space.rebind(params, grads, reduced)
    for place in space.layout.ranges:
        space.layout.view(params, place.name)[...] = place.start
    space.push_params()
    starts = {place.name: place.start for place in space.layout.ranges}
    assert all((p.numpy() == starts[name]).all() for name, p in model.named_parameters())


def test_on_top_of_host_memory_where_the_device_shares_it(model, device):
    space = model.flat_space()
    space.rebind(*host_arrays(space))
    assert space.is_staged is not device.shares_host_memory
    assert (space.reduced is space.grads) is space.is_staged


def test_arrays_that_are_not_aligned_are_staged(model, device):
    space = model.flat_space()
    span = space.layout.span
    params, grads, reduced = (page_aligned(span + 4)[4:] for _ in range(3))
    space.rebind(params, grads, reduced)
    assert space.is_staged
    run_backward(model, device)
    space.moves.pull(0, span)
    assert_same({n: space.layout.view(grads, n).copy() for n, _ in model.named_parameters()}, gradients(model))


def test_a_world_of_one_has_one_array_for_grads_and_reduced(model, device):
    space = model.flat_space()
    params, grads, _ = host_arrays(space)
    space.rebind(params, grads, grads)
    run_backward(model, device)
    expected = gradients(model)
    space.moves.pull(0, space.layout.span)
    space.moves.push(0, space.layout.span)
    assert_same(gradients(model), expected)
    run_backward(model, device)
    assert {s.state for s in space.slots} == {LOCAL}
    for name, value in gradients(model).items():
        np.testing.assert_array_equal(value, 2 * expected[name])


def test_reduced_gradients_are_what_parameters_show_and_are_never_written(model, device):
    space = model.flat_space()
    params, grads, reduced = host_arrays(space)
    space.rebind(params, grads, reduced)
    run_backward(model, device)
    own = gradients(model)
    space.moves.pull(0, space.layout.span)
    reduced.view(np.float32)[:] = 10.0
    space.moves.push(0, space.layout.span)
    assert {s.state for s in space.slots} == {REDUCED}
    assert all((p.grad.numpy() == 10).all() for p in model.parameters())
    run_backward(model, device)  # accumulates on top of the averaged gradients, in `grads`
    assert {s.state for s in space.slots} == {LOCAL}
    for name, value in gradients(model).items():
        np.testing.assert_array_equal(value, np.float32(10) + own[name])
    assert (reduced.view(np.float32) == 10).all()


def test_a_range_marks_only_its_own_slots(model, device):
    space = model.flat_space()
    space.rebind(*host_arrays(space))
    run_backward(model, device)
    first = space.layout.ranges[0]
    space.moves.pull(first.start, first.stop)
    space.moves.push(first.start, first.stop)
    assert [s.state for s in space.slots] == [REDUCED, LOCAL, LOCAL, LOCAL]


def test_missing_gradients_count_as_zero(model, device):
    space = model.flat_space()
    params, grads, reduced = host_arrays(space)
    space.rebind(params, grads, reduced)
    run_backward(model, device)
    space.zero_grad()
    first = model[0]
    first(Tensor(np.ones((2, 7)), device)).sum().backward()
    grads_before = gradients(model)
    assert sorted(grads_before) == ["0.bias", "0.weight"]
    space.moves.pull(0, space.layout.span)
    assert (space.layout.view(grads, "2.weight") == 0).all() and (space.layout.view(grads, "2.bias") == 0).all()
    assert space.layout.view(grads, "0.bias").tobytes() == grads_before["0.bias"].tobytes()


def test_complete_grads_never_mixes_averaged_and_own(model, device):
    space = model.flat_space()
    params, grads, reduced = host_arrays(space)
    space.rebind(params, grads, reduced)
    run_backward(model, device)
    space.moves.pull(0, space.layout.span)
    reduced.view(np.float32)[:] = 10.0
    space.moves.push(0, space.layout.span)
    assert space.complete_grads() is space.reduced
    space.slots[1].drop()
    assert space.complete_grads() is space.grads
    flat = flat_host(space, space.grads)
    values = [set(space.layout.view(flat, place.name).ravel().tolist()) for place in space.layout.ranges]
    assert values == [{10.0}, {0.0}, {10.0}, {10.0}]


def test_setting_and_clearing_a_gradient(model, device):
    model.flat_space()
    bias = model[0].bias
    bias.grad = Tensor(np.arange(5.0), device)
    assert bias.grad.numpy().tolist() == [0, 1, 2, 3, 4]
    bias.grad = bias.grad
    assert bias.grad.numpy().tolist() == [0, 1, 2, 3, 4]
    bias.grad = None
    assert bias.grad is None


def test_frozen_parameters_stay_outside(device):
    model = Sequential(Linear(3, 2, device=device), Linear(2, 2, device=device))
    model[0].weight.requires_grad = False
    space = model.flat_space()
    assert [place.name for place in space.layout.ranges] == ["1.bias", "1.weight", "0.bias"]
    F.mse_loss(model(Tensor(np.ones((1, 3)), device)), Tensor(np.zeros((1, 2)), device)).backward()
    assert model[0].weight.grad is None and model[0].bias.grad is not None


def test_a_convolution_trains_in_the_flat_space(device):
    model = Sequential(Conv2d(2, 3, 3, padding=1, device=device))
    x = Tensor(np.random.default_rng(1).standard_normal((2, 2, 5, 5)), device)
    model(x).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    model.flat_space()
    model(x).sum().backward()
    assert_same(gradients(model), expected)


def test_a_space_made_by_parameters_takes_the_modules_names(model):
    space = flat_space_of(model.parameters())
    assert model.flat_space() is space
    assert [place.name for place in space.layout.ranges] == ["2.bias", "2.weight", "0.bias", "0.weight"]
    assert FlatSpace.holding(model.named_parameters()) is space


def in_a_space(device) -> FlatSpace:
    return flat_space_of([Parameter([1.0], device)])


def test_refuses(model, device):
    with pytest.raises(ArgumentError, match="expected at least one trainable parameter"):
        flat_space_of([])
    with pytest.raises(ArgumentError, match="'0': expected a Parameter, got Tensor"):
        flat_space_of([Tensor([1.0], device)])
    p = Parameter([1.0], device)
    with pytest.raises(ArgumentError, match="expected each one once"):
        flat_space_of([p, p])
    flat_space_of([p])
    with pytest.raises(ArgumentError, match="already is in one"):
        flat_space_of([p])
    with pytest.raises(ArgumentError, match="some are in a flat space with others"):
        FlatSpace.holding([("p", p), *model.named_parameters(), ("q", next(iter(in_a_space(device).parameters)))])
    space = flat_space_of(reversed(list(model.parameters())))
    assert model.flat_space() is space  # in the order in which they were given, under the model's names
    assert [place.name for place in space.layout.ranges] == [name for name, _ in model.named_parameters()]
    with pytest.raises(ArgumentError, match=r"call rebind\(\) first"):
        space.moves.pull(0, space.layout.span)
    good = page_aligned(space.layout.span)
    with pytest.raises(ArgumentError, match=r"grads: expected \d+ contiguous uint8, got float32 of shape"):
        space.rebind(good, good.view(np.float32), good)


#: Tensors that share a parameter's memory, and that a program may keep when it drops the model.
KEPT = {
    "detached": lambda p: p.detach(),
    "in another shape": lambda p: p.alias((p.numel(),)),
    "reshaped on the tape": lambda p: p.reshape(-1),
    "detached twice": lambda p: p.reshape(-1).detach(),
    "as in another parameter": lambda p: _parameter_on(p.detach()),
}


def _parameter_on(tensor: Tensor) -> Tensor:
    other = Parameter(np.zeros(tensor.shape, np.float32), tensor.device)
    other.buffer = tensor.buffer
    return other


@pytest.mark.sampled(8)
@pytest.mark.parametrize("way", list(KEPT))
@pytest.mark.parametrize("moved", [False, True], ids=["dropped", "moved"])
def test_what_shares_a_parameters_memory_keeps_it(device, way, moved):
    """After the model is dropped, or its flat space has moved to other arrays; and no longer than needed."""
    model = Sequential(Linear(7, 5, device=device))
    space = model.flat_space()
    arrays = host_arrays(space)
    space.rebind(*arrays)
    if space.is_staged:
        pytest.skip("the device has memory of its own")
    memory = weakref.ref(arrays[0])
    kept = KEPT[way](model[0].weight)
    expected = model[0].weight.numpy().reshape(kept.shape)
    if moved:
        space.rebind(*host_arrays(space))
    else:
        del model
    del space, arrays
    gc.collect()
    assert memory() is not None
    assert kept.numpy().tobytes() == expected.tobytes()
    del kept
    gc.collect()
    device.finish()
    assert memory() is None
