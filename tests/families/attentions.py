"""Attention of every remainder of queries, keys and lengths, causal, masked and not, apart and packed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clcomm.engine import Tensor
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from tests.families.family import Family, assert_near, drawn, leaf

SEEN = ("all", "causal", "flags", "added", "added to keys")


class Case(NamedTuple):
    """q [B, H, queries, head], k [B, H, keys, head], v [B, H, keys, value]; `seen` is one of SEEN."""

    groups: tuple[int, int]
    queries: int
    keys: int
    head: int
    value: int
    seen: str
    packed: bool
    seed: int


def draw(rng: np.random.Generator, longest: int, number: int) -> Case:
    """Draw an attention; lengths come from a few, as each is a build, and packed ones share a build with others."""
    queries, keys = (int(n) for n in rng.integers(1, 4 * longest, 2))
    head, value = ((8, 8), (5, 3), (20, 40), (32, 32))[number % (4 if longest > 20 else 2)]
    packed = number % 8 < 4 if head == value else number > 15 and number % 3 == 0
    if packed:
        keys, value = queries, head
    groups = (int(rng.integers(1, 3)), int(rng.integers(1, 4)))
    return Case(groups, queries, keys, head, value, SEEN[number % len(SEEN)], packed, int(rng.integers(1 << 30)))


def mask_of(case: Case, rng: np.random.Generator) -> np.ndarray | None:
    """Return the mask of a case: flags, of which the first query's are all False, or what is added to the scores."""
    if case.seen == "flags":
        flags = rng.random((case.groups[0], 1, case.queries, case.keys)) < 0.6
        flags[0, 0, 0] = False
        return flags
    if case.seen == "added":
        return rng.uniform(-2, 2, (case.groups[1], case.queries, case.keys)).astype(np.float32)
    if case.seen == "added to keys":
        return rng.choice(np.float32([0, 1, -np.inf]), (case.groups[0], 1, 1, case.keys))
    return None


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, grad: np.ndarray, added: np.ndarray | float, scale: float):
    """Return the result and the gradients of q, k and v, by the definitions."""
    scores = scale * q @ k.swapaxes(-1, -2) + added
    top = scores.max(-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = powers.sum(-1, keepdims=True)
    weights = powers / np.where(total == 0, 1, total)
    slopes = grad @ v.swapaxes(-1, -2)
    slopes = scale * weights * (slopes - (slopes * weights).sum(-1, keepdims=True))
    return weights @ v, slopes @ k, slopes.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ grad


def added_of(case: Case, mask: np.ndarray | None) -> np.ndarray | float:
    """Return what is added to the scores."""
    if case.seen == "causal":
        return np.where(np.tri(case.queries, case.keys, dtype=bool), 0.0, -np.inf)
    return 0.0 if mask is None else np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask.astype(np.float64)


def check(device: Device, case: Case) -> None:
    """Compare attention and its gradients with float64."""
    rng = np.random.default_rng(case.seed)
    sizes = (case.queries, case.head), (case.keys, case.head), (case.keys, case.value), (case.queries, case.value)
    hosts = [rng.uniform(-2, 2, (*case.groups, *size)).astype(np.float32) for size in sizes]
    mask, scale = mask_of(case, rng), None if case.seed % 2 else 0.3
    seen = {"attn_mask": mask, "is_causal": case.seen == "causal", "scale": scale}
    if case.seen == "flags" and case.seed % 4 < 2:
        seen["attn_mask"] = Tensor(mask.astype(np.int32), device)
    exact = [host.astype(np.float64) for host in hosts]
    y, *gradients = reference(*exact, added_of(case, mask), scale or case.head**-0.5)
    if case.packed:
        qkv = leaf(device, beside(np.stack(hosts[:3])))
        result = F.packed_attention(qkv, case.groups[1], **seen)
        assert_near(result, beside(y[None]), "attention")
        result.backward(leaf(device, beside(hosts[3][None]), False))
        assert_near(qkv.grad, beside(np.stack(gradients)), "gradient")
        return
    leaves = [leaf(device, host) for host in hosts[:3]]
    result = F.scaled_dot_product_attention(*leaves, **seen)
    assert_near(result, y, "attention")
    result.backward(leaf(device, hosts[3], False))
    for name, own, gradient in zip("qkv", leaves, gradients, strict=True):
        assert_near(own.grad, gradient, f"gradient of {name}")


def beside(parts: np.ndarray) -> np.ndarray:
    """Return [parts, batches, heads, tokens, length] as [batches, tokens, parts * heads * length]."""
    lying = parts.transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(lying).reshape(*lying.shape[:2], -1)


ATTENTION = Family("attention", drawn(draw), check)
