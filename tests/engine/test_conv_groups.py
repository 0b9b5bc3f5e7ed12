"""Convolution in groups and dilated, and transposed, against PyTorch in float64, with slopes and initial values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.engine import Conv2d, ConvTranspose2d, Generator, MaxPool2d, ReLU, Sequential, Tensor
from clcomm.engine import functional as F


def compare(torch, device, ours, theirs, hosts, tolerance=1e-5):
    """Compare results and gradients with PyTorch's in float64."""
    leaves = [Tensor(host, device, requires_grad=True) for host in hosts]
    exact = [torch.tensor(host.astype(np.float64), requires_grad=True) for host in hosts]
    y, expected = ours(*leaves), theirs(*exact)
    assert y.shape == tuple(expected.shape)
    grad = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    y.backward(Tensor(grad, device))
    expected.backward(torch.tensor(grad.astype(np.float64)))
    pairs = [(y, expected.detach()), *((a.grad, b.grad) for a, b in zip(leaves, exact, strict=True))]
    for found, wanted in pairs:
        scale = 1 + wanted.abs().max().item()
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=0, atol=tolerance * scale)


def drawn(*shapes):
    rng = np.random.default_rng(len(shapes))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@given(data=st.data())
def test_transposed_convolution_agrees_with_pytorch(torch, device, data):
    stride = data.draw(st.integers(1, 3))
    kernel = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    padding = tuple(data.draw(st.integers(0, (k - 1) // 2)) for k in kernel)
    groups, dilation = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    more = tuple(data.draw(st.integers(0, max(stride, dilation) - 1)) for _ in kernel)
    sides = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    channels, outputs = groups * data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    images = data.draw(st.sampled_from([1, 2, 9]))
    hosts = drawn((images, channels, *sides), (channels, outputs, *kernel), (groups * outputs,))
    compare(
        torch,
        device,
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride, padding, more, groups, dilation),
        lambda x, w, b: torch.nn.functional.conv_transpose2d(x, w, b, stride, padding, more, groups, dilation),
        hosts,
    )


@pytest.mark.parametrize("images", [2, 8])
def test_groups_that_are_large_enough_for_products(torch, device, images):
    hosts = drawn((images, 2 * 64, 6, 5), (2 * 64, 64, 3, 3), (2 * 64,))
    compare(
        torch,
        device,
        lambda x, w, b: F.conv2d(x, w, b, 2, 1, groups=2),
        lambda x, w, b: torch.nn.functional.conv2d(x, w, b, 2, 1, groups=2),
        hosts,
        tolerance=3e-5,
    )


@pytest.mark.parametrize(
    ("images", "channels", "outputs", "side", "stride"), [(8, 64, 32, 8, 2), (16, 16, 3, 12, 1), (2, 128, 64, 4, 2)]
)
def test_both_ways_of_computing_a_transposed_convolution(torch, device, images, channels, outputs, side, stride):
    hosts = drawn((images, channels, side, side), (channels, outputs, 4, 4))
    compare(
        torch,
        device,
        lambda x, w: F.conv_transpose2d(x, w, None, stride, 1),
        lambda x, w: torch.nn.functional.conv_transpose2d(x, w, None, stride, 1),
        hosts,
        tolerance=3e-5,
    )


def test_layers_start_and_compute_as_pytorchs(torch, device):
    x = drawn((2, 6, 5, 4))[0]
    for make, reference in (
        (lambda **more: Conv2d(6, 4, 3, 1, 1, groups=2, dilation=(1, 2), **more),
         lambda: torch.nn.Conv2d(6, 4, 3, 1, 1, (1, 2), 2)),
        (lambda **more: ConvTranspose2d(6, 4, (2, 3), 2, 1, 1, **more),
         lambda: torch.nn.ConvTranspose2d(6, 4, (2, 3), 2, 1, 1)),
        (lambda **more: ConvTranspose2d(6, 4, 3, bias=False, **more),
         lambda: torch.nn.ConvTranspose2d(6, 4, 3, bias=False)),
        (lambda **more: ConvTranspose2d(6, 4, 3, groups=2, dilation=2, **more),
         lambda: torch.nn.ConvTranspose2d(6, 4, 3, groups=2, dilation=2)),
    ):  # fmt: skip
        torch.manual_seed(11)
        theirs = reference()
        ours = make(device=device, rng=Generator(11))
        state = theirs.state_dict()
        assert list(ours.state_dict()) == list(state)
        for name, value in ours.state_dict().items():
            assert value.tobytes() == state[name].numpy().tobytes(), name
        found, expected = ours(Tensor(x, device)).numpy(), theirs(torch.tensor(x)).detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("more", [{"groups": 2}, {"dilation": (1, 2)}])
def test_a_convolution_in_groups_or_dilated_is_not_run_together_with_what_follows(device, more):
    layers = [Conv2d(4, 4, 3, padding=1, **more, device=device, rng=Generator(1)), ReLU(), MaxPool2d(2)]
    x = Tensor(drawn((8, 4, 8, 8))[0], device)
    apart = layers[2](layers[1](layers[0](x)))
    assert Sequential(*layers)(x).numpy().tobytes() == apart.numpy().tobytes()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: F.conv2d(x, w, groups=0), "conv2d: groups: expected a whole number from 1 up, got 0"),
        (lambda x, w: F.conv2d(x, w, groups=2), r"conv2d: groups: expected x .* got shapes \(2, 4, 5, 5\)"),
        (lambda x, w: F.conv_transpose2d(x, w, stride=0), "stride: expected a whole number from 1 up, or two"),
        (lambda x, w: F.conv_transpose2d(x, w, output_padding=1), "output_padding: expected less than the stride 1"),
        (lambda x, w: F.conv_transpose2d(x, w, padding=4), "padding: expected to leave rows and columns, got -1 x -1"),
        (lambda x, w: F.conv_transpose2d(w, x), r"expected x \[N, C, H, W\] and weight \[C, O"),
        (lambda x, w: F.conv_transpose2d(x, w, groups=3), r"C divided by 3, got shapes \(2, 4, 5, 5\)"),
        (lambda x, w: F.conv2d(x[:, :3], w, dilation=0), "dilation: expected a whole number from 1 up, .* got 0"),
        (
            lambda x, w: F.conv2d(x[:, :3], w, dilation=3),
            "a kernel no larger than the image with its padding, 5 x 5, got 7 x 7",
        ),
        (lambda x, w: F.conv_transpose2d(x, w, Tensor(np.ones(4), x.device)), "bias"),
    ],
)
def test_wrong_arguments(device, call, message):
    with pytest.raises(ArgumentError, match=message):
        call(*(Tensor(np.ones(shape), device) for shape in ((2, 4, 5, 5), (4, 3, 3, 3))))


def test_groups_that_do_not_divide_the_channels():
    with pytest.raises(ArgumentError, match="groups: expected to divide 4 and 6 channels, got 4"):
        Conv2d(4, 6, 3, groups=4)
