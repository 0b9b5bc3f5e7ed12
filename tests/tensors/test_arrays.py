"""Copies between tensors: values, autograd's knowledge of them, and memory that stays PyTorch's to resize."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.comm.tensors.arrays import copy_values  # noqa: E402

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool, torch.complex64]
#: Views of a tensor [6, 8]: contiguous, a part, turned, every second column.
VIEWS = {"whole": lambda t: t, "rows": lambda t: t[2:5], "turned": lambda t: t.T, "columns": lambda t: t[:, ::2]}


def values(dtype):
    return torch.arange(48).reshape(6, 8).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("into", VIEWS)
@pytest.mark.parametrize("other", [None, torch.float64])
def test_values_as_copy(dtype, into, other):
    own, theirs = torch.zeros(6, 8, dtype=dtype), torch.zeros(6, 8, dtype=dtype)
    source = VIEWS[into](values(dtype if other is None or dtype.is_complex else other))
    copy_values(VIEWS[into](own), source)
    VIEWS[into](theirs).copy_(source)
    assert own.equal(theirs)


def test_conjugate_and_negative_views():
    source = torch.tensor([1 + 2j, 3 - 4j])
    for view in (source.conj(), source.conj().imag):
        own = torch.zeros_like(view, memory_format=torch.contiguous_format)
        copy_values(own, view)
        assert own.equal(view.clone())


def test_autograd_knows_of_the_change():
    x = torch.ones(3, requires_grad=True)
    y = (x * x).exp()
    copy_values(y.detach(), torch.zeros(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_inference_mode():
    with torch.inference_mode():
        tensor = torch.zeros(5)
        copy_values(tensor, torch.ones(5))
        assert tensor.tolist() == [1] * 5


def test_memory_can_be_resized_afterwards():
    """As FullyShardedDataParallel does with what it has gathered."""
    tensor = torch.zeros(5)
    copy_values(tensor, torch.ones(5))
    tensor.untyped_storage().resize_(0)
