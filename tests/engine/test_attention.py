"""Attention: masks, special numbers, bits on other numbers of cores and lanes, and the layer beside PyTorch's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Generator, MultiheadAttention, Tensor
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.tuning import Tuning
from tests.engine.values import drawn
from tests.families.attentions import SEEN, Case, check, mask_of, reference


def test_the_longest_keys(device):
    check(device, Case((1, 2), 40, 50, 512, 512, "causal", False, 1))


@pytest.mark.parametrize("before", [(), (3,), (2, 1, 3)])
@pytest.mark.parametrize("mask", [(9,), (7, 9), (7, 1), (1, 1)])
def test_any_dimensions_before_the_last_two(device, before, mask):
    hosts = [drawn(n, *before, *size) for n, size in enumerate([(7, 8), (9, 8), (9, 8)])]
    added = drawn(5, *mask)
    y = F.scaled_dot_product_attention(*(Tensor(host, device) for host in hosts), Tensor(added, device))
    exact = [host.astype(np.float64) for host in hosts]
    expected, *_ = reference(*exact, np.zeros_like(y.numpy()), np.broadcast_to(added, (7, 9)), 8**-0.5)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", [(2, 3, 4, 7, 9), (2, 1, 4, 7, 9), (3, 1, 7, 9), (2, 1, 1, 1, 9), (4, 1, 9)])
def test_masks_of_some_dimensions(device, mask):
    hosts = [drawn(n, 2, 3, 4, *size) for n, size in enumerate([(7, 8), (9, 8), (9, 8)])]
    added = drawn(5, *mask)
    y = F.scaled_dot_product_attention(*(Tensor(host, device) for host in hosts), Tensor(added, device))
    exact = [host.astype(np.float64) for host in hosts]
    expected, *_ = reference(*exact, np.zeros_like(y.numpy()), added, 8**-0.5)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-6)


def _bits(device: Device, seen: str) -> tuple[bytes, ...]:
    case = Case((2, 3), 75, 101, 20, 40, seen, False, 4)
    hosts = [drawn(1, 2, 3, 75, 20), drawn(2, 2, 3, 101, 20), drawn(3, 2, 3, 101, 40)]
    leaves = [Tensor(host, device, requires_grad=True) for host in hosts]
    mask = mask_of(case, np.random.default_rng(4))
    y = F.scaled_dot_product_attention(*leaves, mask, is_causal=seen == "causal")
    y.backward(Tensor(drawn(4, 2, 3, 75, 40), device))
    return y.numpy().tobytes(), *(x.grad.numpy().tobytes() for x in leaves)


@pytest.mark.parametrize("seen", SEEN)
def test_same_bits_on_any_number_of_cores_and_lanes(device, seen, monkeypatch):
    first = _bits(device, seen)
    for units in (1, 3, 16):
        monkeypatch.setattr(device, "compute_units", units)
        assert _bits(device, seen) == first
    if device.is_cpu:
        for tile in ((6, 16, 8), (12, 32, 16)):
            own = Device(device.cl_device, kind="cpu", tuning=replace(Tuning(), gemm_tile=tile))
            assert _bits(own, seen) == first


def test_queries_without_keys_give_zeros_and_take_no_part_in_gradients(device):
    hosts = [drawn(n, 1, 1, 4, 8) for n in range(3)]
    leaves = [Tensor(host, device, requires_grad=True) for host in hosts]
    flags = np.ones((4, 4), bool)
    flags[2] = False
    y = F.scaled_dot_product_attention(*leaves, flags)
    assert not y.numpy()[0, 0, 2].any() and y.numpy()[0, 0, [0, 1, 3]].all()
    upstream = np.zeros((1, 1, 4, 8), np.float32)
    upstream[0, 0, 2] = 1
    y.backward(Tensor(upstream, device))
    assert not any(x.grad.numpy().any() for x in leaves)


def test_scores_of_any_size_stay_finite(device):
    q, k, v = (drawn(n, 1, 1, 40, 8) for n in range(3))
    leaves = [Tensor(host, device, requires_grad=True) for host in (q * 300, k * 300, v)]
    y = F.scaled_dot_product_attention(*leaves)
    best = (q @ k.swapaxes(-1, -2)).argmax(-1)[0, 0]
    np.testing.assert_allclose(y.numpy()[0, 0], v[0, 0, best], rtol=1e-5)
    y.backward(1.0)
    assert all(np.isfinite(x.grad.numpy()).all() for x in leaves)


def test_nan_reaches_what_sees_it_and_nothing_else(device):
    hosts = [drawn(n, 1, 2, 40, 8) for n in range(3)]
    hosts[1][0, 0, 30] = np.nan
    y = F.scaled_dot_product_attention(*(Tensor(host, device) for host in hosts), is_causal=True).numpy()
    assert np.isnan(y[0, 0, 30:]).all() and np.isfinite(y[0, 0, :30]).all() and np.isfinite(y[0, 1]).all()


def test_only_the_gradients_that_are_needed(device):
    q, k, v = (Tensor(drawn(n, 1, 1, 5, 8), device, requires_grad=n == 1) for n in range(3))
    F.scaled_dot_product_attention(q, k, v).backward(1.0)
    assert q.grad is None and v.grad is None and k.grad.numpy().any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: F.scaled_dot_product_attention(t(3), t(3, 2), t(3, 2)), "query: expected at least 2 dimensions"),
        (lambda t: F.scaled_dot_product_attention(t(3, 2), t(3, 4), t(3, 2)), "expected key [..., keys, 2] and value"),
        (lambda t: F.scaled_dot_product_attention(t(1, 3, 2), t(3, 2), t(3, 2)), "expected key [..., keys, 2]"),
        (lambda t: F.scaled_dot_product_attention(t(3, 2), t(4, 2), t(3, 2)), "expected as many values as keys, 4,"),
        (
            lambda t: F.scaled_dot_product_attention(t(3, 2), t(4, 2), t(4, 513)),
            "expected keys and values of at most 512 numbers, got 513",
        ),
        (
            lambda t: F.scaled_dot_product_attention(t(3, 2), t(4, 2), t(4, 2), t(3, 5)),
            "attn_mask: expected a shape that broadcasts to (1, 3, 4), got (3, 5)",
        ),
        (
            lambda t: F.scaled_dot_product_attention(t(3, 2), t(4, 2), t(4, 2), t(3, 4), is_causal=True),
            "expected no attn_mask with is_causal",
        ),
        (
            lambda t: F.scaled_dot_product_attention(t(3, 2), t(4, 2), t(4, 2), np.ones((3, 4), int)),
            "attn_mask: expected booleans or floats, got int64",
        ),
        (
            lambda t: F.scaled_dot_product_attention(
                t(3, 2), t(4, 2), t(4, 2), Tensor(np.ones((3, 4)), t(1).device, requires_grad=True)
            ),
            "attn_mask: expected one that needs no gradient",
        ),
    ],
)
def test_wrong_arguments(device, call, message):
    with pytest.raises(ArgumentError) as caught:
        call(lambda *shape: Tensor(np.ones(shape, np.float32), device))
    assert str(caught.value).startswith("scaled_dot_product_attention: " + message)


@pytest.mark.parametrize(
    ("shape", "heads", "message"),
    [
        ((12,), 2, "qkv: expected at least 2 dimensions, got shape (12,)"),
        ((4, 12), 3, "expected 3 * heads to divide the last dimension of (4, 12), got heads 3"),
        ((4, 12), 0, "expected 3 * heads to divide the last dimension of (4, 12), got heads 0"),
    ],
)
def test_wrong_arguments_of_packed_attention(device, shape, heads, message):
    with pytest.raises(ArgumentError) as caught:
        F.packed_attention(Tensor(np.ones(shape), device), heads)
    assert str(caught.value) == "packed_attention: " + message


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("itself", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_as_pytorchs(device, seen, itself, bias):
    torch = pytest.importorskip("torch")
    torch.manual_seed(7)
    theirs = torch.nn.MultiheadAttention(24, 3, bias=bias, batch_first=True)
    ours = MultiheadAttention(24, 3, bias=bias, batch_first=True, device=device, rng=Generator(7))
    named = dict(theirs.named_parameters())
    assert {name: values.tobytes() for name, values in ours.state_dict().items()} == {
        name: values.detach().numpy().tobytes() for name, values in named.items()
    }
    queries, keys = 11, 11 if itself else 17
    hosts = [drawn(1, 2, queries, 24)] + ([] if itself else [drawn(2, 2, keys, 24), drawn(3, 2, keys, 24)])
    mask = mask_of(Case((2, 3), queries, keys, 8, 8, seen, False, 5), np.random.default_rng(5))
    mask = np.tri(queries, keys, dtype=bool) if seen == "causal" else mask
    if seen == "flags":
        mask[..., 0] = True  # PyTorch gives NaN for a query that sees no key
    if seen == "added to keys":
        mask[..., 0] = 0
    whole = None if mask is None else np.broadcast_to(mask, (2, 3, queries, keys))
    turned = None if mask is None else (~whole if mask.dtype == bool else whole)
    xs, ts = (
        [Tensor(h, device, requires_grad=True) for h in hosts],
        [torch.tensor(h, requires_grad=True) for h in hosts],
    )
    given_mask = {"attn_mask": None if turned is None else turned.copy()}
    given = {"is_causal": True} if seen == "causal" else given_mask
    result, weights = ours(*xs, need_weights=False, **given)
    assert weights is None
    expected, _ = theirs(
        *(ts * 3 if itself else ts), need_weights=False,
        attn_mask=None if turned is None else torch.tensor(turned.reshape(6, queries, keys)),
    )  # fmt: skip
    np.testing.assert_allclose(result.numpy(), expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    upstream = drawn(4, 2, queries, 24)
    result.backward(Tensor(upstream, device))
    expected.backward(torch.tensor(upstream))
    pairs = [*zip(xs, ts, strict=True), *((p, named[name]) for name, p in ours.named_parameters())]
    for our, their in pairs:
        np.testing.assert_allclose(our.grad.numpy(), their.grad.numpy(), rtol=1e-3, atol=1e-4)


def test_wrong_arguments_of_the_layer(device):
    with pytest.raises(ArgumentError, match="num_heads: expected a number that divides embed_dim 10, got 3"):
        MultiheadAttention(10, 3, batch_first=True, device=device)
    x = Tensor(np.ones((1, 2, 4)), device)
    with pytest.raises(
        ArgumentError, match="multi_head_attention: expected heads that divide the widths 4 and 4, got 3"
    ):
        F.multi_head_attention(x, x, x, 3)
    with pytest.raises(ArgumentError, match="attn_mask: expected an array of booleans or float32"):
        MultiheadAttention(4, 2, batch_first=True, device=device)(
            x, need_weights=False, attn_mask=Tensor(np.ones((2, 2), int), device)
        )
