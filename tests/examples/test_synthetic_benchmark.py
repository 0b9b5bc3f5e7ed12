"""examples.synthetic_benchmark as a user runs it: every model, its figures, and what it refuses."""

from __future__ import annotations

import re

import pytest

from clcomm.base.errors import ArgumentError
from examples.synthetic_benchmark import workload
from tests.examples.test_examples import launch, run
from training.options import MODELS
from training.synthetic_options import SyntheticOptions

#: The options of a small run of each model.
SMALL = {
    "mlp": ("--image-shape", "1x4x4"), "convnet": ("--image-shape", "1x6x5"), "lenet": ("--image-shape", "2x12x13"),
    "resnet": ("--image-shape", "3x4x4"), "gpt": ("--context", "4"),
}  # fmt: skip
RUN = ("--batch-size", "3", "--num-warmup-batches", "1", "--num-batches-per-iter", "2", "--num-iters", "3")
NUMBER = r"([\d,]+\.\d)"


def test_every_model_of_the_examples_is_measured_here() -> None:
    assert set(SMALL) == {*MODELS, "gpt"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "ranks", "more"),
    [
        ("mlp", 0, ()), ("mlp", 3, ("--compression", "fp16")), ("convnet", 2, ("--bucket-size", "1KiB")),
        ("lenet", 4, ()), ("resnet", 2, ()), ("gpt", 2, ()), ("lenet", 2, ("--engine", "torch")),
    ],
)  # fmt: skip
def test_it_prints_what_horovods_prints(model: str, ranks: int, more: tuple[str, ...]) -> None:
    if "torch" in more:
        pytest.importorskip("torch", reason="PyTorch is not installed")
    out = run("examples.synthetic_benchmark", "--model", model, *SMALL[model], *RUN, *more, ranks=ranks)
    unit, size = "tokens" if model == "gpt" else "img", max(ranks, 1)
    lines = out.splitlines()
    assert lines[0].startswith(f"Model: {model}, ") and lines[1:3] == ["Batch size: 3", f"Number of ranks: {size}"]
    each = [re.fullmatch(rf"Iter #{n}: {NUMBER} {unit}/sec per rank", line) for n, line in enumerate(lines[3:6])]
    rates = [float(line[1].replace(",", "")) for line in each if line]
    mean = re.fullmatch(rf"{unit.capitalize()}/sec per rank: {NUMBER} \+-{NUMBER}", lines[6])
    total = re.fullmatch(rf"Total {unit}/sec on {size} rank\(s\): {NUMBER} \+-{NUMBER}", lines[7])
    assert len(rates) == 3 and min(rates) > 0 and mean is not None and total is not None and len(lines) == 8
    values = [[float(found[i].replace(",", "")) for i in (1, 2)] for found in (mean, total)]
    assert values[0][0] == pytest.approx(sum(rates) / 3, abs=0.2)
    assert values[1] == pytest.approx([size * value for value in values[0]], abs=0.06 * size + 0.1)


def test_a_batch_has_a_label_for_each_image_or_token() -> None:
    class World:
        rank, local_rank, local_size, cores = 0, 0, 1, 1

    options = SyntheticOptions(model="gpt", context=5, batch_size=2, device="cpu")
    _, (inputs, targets) = workload(options, World)  # type: ignore[arg-type]
    assert inputs.shape == targets.shape == (2, 5) and (inputs[:, 1:] == targets[:, :-1]).all()
    options = SyntheticOptions(model="mlp", image_shape=(1, 2, 3), batch_size=2, device="cpu")
    _, (inputs, targets) = workload(options, World)  # type: ignore[arg-type]
    assert (inputs.shape, targets.shape) == ((2, 1, 2, 3), (2,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_shape": "3x32"}, "--image-shape: expected channels x height x width, such as 3x32x32, got '3x32'"),
        ({"image_shape": "0x2x2"}, "--image-shape: expected a whole number from 1 up, got '0'"),
        ({"image_shape": 3}, "--image-shape: expected channels x height x width, such as 3x32x32, got 3"),
        ({"image_shape": "1x٣x2"}, "--image-shape: expected a whole number from 1 up, got '٣'"),
        ({"num_iters": 0}, "--num-iters: expected a whole number from 1 up, got '0'"),
        ({"model": "gpt", "engine": "torch"}, "--model gpt: needs --engine native, got torch"),
        ({"model": "vgg"}, "--model: expected one of convnet, mlp, lenet, resnet, gpt, got 'vgg'"),
        ({"compression": "zip"}, "compression: expected "),
    ],
)
def test_what_does_not_fit_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        SyntheticOptions(**options)
    assert message in str(caught.value)


def test_a_batch_beyond_memory_is_refused_in_one_line() -> None:
    done = launch("examples.synthetic_benchmark", "--model", "mlp", "--image-shape", "1000000x1000x1000", ranks=2)
    assert done.returncode != 0 and done.stderr.count("\n") == 1
    assert "batch_size: expected a value whose memory this host has, got 32" in done.stderr


def test_images_too_small_for_the_model_are_refused_in_one_line() -> None:
    done = launch("examples.synthetic_benchmark", "--model", "lenet", "--image-shape", "1x4x4", *RUN, ranks=2)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "in_shape: expected (channels, height, width) of at least 12 x 12, got (1, 4, 4)" in done.stderr
