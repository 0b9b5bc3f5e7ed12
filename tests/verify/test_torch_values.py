"""What a check reads of PyTorch's tensors: complex, conjugated and sparse ones too."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.tools.verify.torch_hooks import _bytes, _numbers  # noqa: E402

VALUES = [[1 + 2j, 0], [0, 3 - 1j]]


@pytest.mark.parametrize(
    "change", [torch.clone, torch.conj, torch.Tensor.to_sparse, torch.t, lambda each: each.conj().imag]
)
def test_all_of_a_tensors_values_are_compared(change):
    tensor = change(torch.tensor(VALUES))
    expected = change(torch.tensor(VALUES)).to_dense().resolve_conj().tolist()
    numbers, kind = _numbers(tensor), np.complex64 if tensor.is_complex() else np.float32
    assert (numbers.view(complex)[..., 0] if tensor.is_complex() else numbers).tolist() == expected
    assert _bytes(tensor).view(kind).tolist() == np.ravel(expected).tolist()
