"""The three engines agree: the same initial bits, and the same losses, gradients and steps from them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError, CheckpointError, DeviceError
from clcomm.base.host.arrays import aligned_empty
from tests.helpers import cpu_device, installs
from training.engines.parts import build_parts

SHAPE, CLASSES, BATCH = (1, 8, 8), 10, 4


def build(engine, model="mlp", seed=3, shape=SHAPE):
    if engine != "native":
        pytest.importorskip(engine, reason=f"{engine} is not installed")
    device = "cpu" if engine == "torch" else cpu_device("cpu")
    return build_parts(engine, model, shape, CLASSES, seed, device)


def batch(seed=0, rows=BATCH, shape=SHAPE):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, *shape), dtype=np.float32), rng.integers(0, CLASSES, rows)


def loss_of(parts, images, labels):
    inputs, targets = parts.prepare(images, labels)
    return parts.loss_fn(parts.model(inputs), targets)


def test_arrays_that_come_again_keep_their_tensors_and_their_new_values_count():
    parts = build("native")
    places = [(aligned_empty((BATCH, *SHAPE), np.float32), aligned_empty((BATCH,), np.int32)) for _ in range(2)]
    seen = {}
    for number in range(6):
        images, labels = places[number % 2]
        images[...], labels[...] = batch(number)
        tensors = parts.prepare(images, labels)
        assert [each.numpy().tobytes() for each in tensors] == [images.tobytes(), labels.tobytes()]
        assert seen.setdefault(number % 2, tensors)[0] is tensors[0]
        fresh = parts.prepare(*(each.copy() for each in (images, labels)))
        assert parts.loss_fn(parts.model(tensors[0]), tensors[1]).item() == loss_of(parts, *batch(number)).item()
        assert fresh[0] is not tensors[0]


def gradients(parts):
    return {name: parameter.grad.numpy() for name, parameter in parts.model.named_parameters()}


def train(parts, optimizer, seeds):
    for seed in seeds:
        loss_of(parts, *batch(seed)).backward(1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("engine", "model", "shape"),
    [
        *((engine, model, SHAPE) for engine in ("native", "netcl") for model in ("mlp", "convnet")),
        *(("native", model, shape) for model in ("mlp", "convnet") for shape in ((1, 28, 28), (3, 13, 9))),
        *(("native", "lenet", shape) for shape in ((1, 28, 28), (2, 13, 15))),
    ],
)
def test_engines_start_alike_and_agree_with_pytorch(engine, model, shape):
    ours, theirs = build(engine, model, shape=shape), build("torch", model, shape=shape)
    state = theirs.model.state_dict()
    assert list(ours.model.state_dict()) == list(state)
    for name, value in ours.model.state_dict().items():
        assert value.shape == state[name].shape and value.tobytes() == state[name].tobytes(), name
    images, labels = batch(shape=shape)
    np.testing.assert_allclose(ours.predict(images), theirs.predict(images), rtol=1e-4, atol=1e-5)
    losses = [loss_of(parts, images, labels) for parts in (ours, theirs)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for loss in losses:
        loss.backward(0.5)
    expected = gradients(theirs)
    for name, gradient in gradients(ours).items():
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-4 * scale, err_msg=name)


def test_the_residual_network_starts_and_predicts_as_pytorchs():
    ours, theirs = build("native", "resnet"), build("torch", "resnet")
    images, labels = batch()
    for parts in (ours, theirs):  # moves the statistics
        inputs, targets = parts.prepare(images, labels)
        parts.forward_backward(inputs, targets, 1.0)
    np.testing.assert_allclose(ours.predict(images), theirs.predict(images), rtol=1e-3, atol=1e-4)
    state = theirs.model.state_dict()
    for name, value in ours.model.state_dict().items():
        np.testing.assert_allclose(value, state[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert ours.model.training and theirs.model.module.training


@pytest.mark.parametrize("model", ["lenet", "resnet"])
def test_netcls_engine_has_two_models(model):
    with pytest.raises(ArgumentError, match=f"model: expected one of mlp, convnet with engine netcl, got '{model}'"):
        build_parts("netcl", model, SHAPE, CLASSES, 0, "cpu")


@pytest.mark.parametrize("engine", ["native", "torch"])
def test_images_too_small_for_lenet_are_refused(engine):
    with pytest.raises(ArgumentError, match=r"in_shape: expected .* of at least 12 x 12, got \(1, 12, 11\)"):
        build(engine, "lenet", shape=(1, 12, 11))


@pytest.mark.parametrize("engine", ["native", "netcl", "torch"])
def test_the_rate_can_be_set_and_only_its_own_state_is_taken(engine):
    parts = build(engine)
    optimizer = parts.make_optimizer("sgd", 0.5, momentum=0.9)
    before = parts.model.state_dict()
    optimizer.lr = 0.0
    train(parts, optimizer, [0])
    assert optimizer.lr == 0.0
    assert all(value.tobytes() == before[name].tobytes() for name, value in parts.model.state_dict().items())
    with pytest.raises((ArgumentError, CheckpointError), match="expected"):
        optimizer.load_state_dict(parts.make_optimizer("adam", 0.1).state_dict())
    with pytest.raises(ArgumentError, match="optimizer"):
        parts.make_optimizer("lbfgs", 0.1)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop"])
def test_pytorchs_optimizer_refuses_a_state_of_nonsense_before_any_change(name):
    parts = build("torch")
    optimizer = parts.make_optimizer(name, 0.1, **({"momentum": 0.9} if name in ("sgd", "rmsprop") else {}))
    train(parts, optimizer, range(2))
    before = optimizer.state_dict()
    for entry, array in before.items():
        if entry == "kind":
            continue
        spoilt = [np.full(array.shape, "text"), np.full(array.shape, None, object)]
        if entry.startswith("step/"):
            spoilt += [np.full(array.shape, -1.0), np.full(array.shape, np.nan)]
        for wrong in spoilt:
            with pytest.raises(CheckpointError, match=r"optimizer state: .*expected numbers"):
                optimizer.load_state_dict({**before, entry: wrong})
    after = optimizer.state_dict()
    assert before.keys() == after.keys()
    assert all(before[entry].tobytes() == after[entry].tobytes() for entry in before)


@pytest.mark.parametrize("engine", ["native", "netcl", "torch"])
def test_the_same_seed_twice_gives_the_same_bits(engine):
    states = []
    for _ in range(2):
        parts = build(engine, "convnet")
        train(parts, parts.make_optimizer("sgd", 0.1, momentum=0.9), range(2))
        states.append(parts.model.state_dict())
    for name, value in states[0].items():
        assert value.tobytes() == states[1][name].tobytes(), name


def test_another_seed_gives_other_values():
    states = [build("native", seed=seed).model.state_dict() for seed in (3, 4)]
    assert not np.array_equal(states[0]["fc1.weight"], states[1]["fc1.weight"])


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (("cuda", "mlp", SHAPE, 10, 0), ArgumentError, "engine: expected one of native, netcl, torch"),
        (("native", "vgg", SHAPE, 10, 0), ArgumentError, "model: expected one of mlp, convnet, lenet, resnet"),
        (("native", "mlp", SHAPE, 10, 0, "no such device"), DeviceError, "no such device"),
    ],
)
def test_unknown_names_are_refused_in_one_line(arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        build_parts(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("engine", ["native", "netcl", "torch"])
def test_a_convnet_needs_room_for_two_pools(engine):
    if engine != "native":
        pytest.importorskip(engine)
    with pytest.raises(ArgumentError, match="at least 4 x 4"):
        build_parts(engine, "convnet", (1, 3, 8), 10, 0, "cpu")


@pytest.mark.parametrize("engine", ["netcl", "torch"])
def test_a_missing_package_is_named_with_the_command_that_brings_it(engine):
    program = (
        f"import sys; sys.modules[{engine!r}] = None\n"
        f"from training.engines.parts import build_parts\n"
        f"build_parts({engine!r}, 'mlp', {SHAPE}, {CLASSES}, 0, 'cpu')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert installs(engine) in ended.stderr.splitlines()[-1]


def test_a_gpu_that_pytorch_lacks_is_refused():
    torch = pytest.importorskip("torch")
    missing = f"gpu:{torch.cuda.device_count()}"
    with pytest.raises(DeviceError, match="cpu"):
        build_parts("torch", "mlp", SHAPE, CLASSES, 0, missing)
