"""`clcomm.lizardist`: LizarDist's modules by their own names, with its defaults and counts."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.lizardist.distributed.communicator import Communicator  # noqa: E402
from clcomm.lizardist.distributed.sync import Synchronizer  # noqa: E402
from clcomm.lizardist.engine.model import MLP, ConvNet  # noqa: E402
from tests.helpers import installs  # noqa: E402

#: Model, and what the Communicator, the Synchronizer, an assignment to that later and the call say; None: nothing.
SETTINGS = [*itertools.product([ConvNet, MLP], *[[None, True, False]] * 4)]
SAMPLED = int(os.environ.get("CLCOMM_PROOF_SETTINGS", "30"))
PER_MODEL = {"ConvNet": (827_688, 8), "MLP": (4 * 118_282, 6)}


def backward(model, rank: int) -> None:
    torch.manual_seed(rank)
    inputs = torch.randn(2, 784) if isinstance(model, MLP) else torch.randn(2, 1, 28, 28)
    torch.nn.functional.cross_entropy(model(inputs), torch.tensor([rank % 10, 3])).backward()


def mean_gradients(kind, seed: int, ranks: int) -> list[np.ndarray]:
    """Return what averaging the ranks' gradients gives, computed in this process."""
    gradients = []
    for rank in range(ranks):
        torch.manual_seed(seed)
        model = kind()
        backward(model, rank)
        gradients.append([parameter.grad.numpy().astype(np.float64) for parameter in model.parameters()])
    return [sum(parts) / ranks for parts in zip(*gradients, strict=True)]


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("kind", "of_comm", "of_sync", "later", "of_call"), random.Random(0).sample(SETTINGS, SAMPLED))
def test_each_setting_gives_lizardists_counts_and_the_mean(kind, of_comm, of_sync, later, of_call):
    """The call's setting goes before the Synchronizer's, as changed later; the Communicator's never counts."""
    torch.set_num_threads(1)
    comm = Communicator() if of_comm is None else Communicator(1 << 20, of_comm)
    sync = Synchronizer(comm) if of_sync is None else Synchronizer(comm, use_bucketing=of_sync)
    assert sync.use_bucketing is comm.use_bucketing is (of_sync is not False)
    torch.manual_seed(3 + comm.get_rank())
    model = kind()
    torch.manual_seed(3)
    start = [parameter.detach().clone() for parameter in kind().parameters()]
    sync.broadcast_parameters(model)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), start, strict=True))
    assert comm.total_allreduce_calls == 0
    buckets = of_sync is not False
    if later is not None:
        sync.use_bucketing = buckets = later
    for step in (1, 2):
        model.zero_grad()
        backward(model, comm.rank)
        sync.sync_gradients(model, use_bucketing=of_call)
        nbytes, tensors = PER_MODEL[kind.__name__]
        calls = 1 if (buckets if of_call is None else of_call) else tensors
        expected = {
            "total_allreduce_calls": step * calls,
            "total_bytes_sent": step * nbytes,
            "average_bytes_per_call": nbytes / calls,
        }
        assert sync.get_communication_stats() == comm.get_bucket_stats() == expected
        assert (comm.total_allreduce_calls, comm.total_bytes_sent) == (step * calls, step * nbytes)
    for parameter, mean in zip(model.parameters(), mean_gradients(kind, 3, comm.size), strict=True):
        np.testing.assert_allclose(parameter.grad.numpy(), mean, rtol=1e-4, atol=1e-6)
    comm.allreduce(np.ones(2))
    assert sync.get_communication_stats()["total_allreduce_calls"] == 2 * calls + 1  # the Communicator's own as well
    comm.finalize()


def test_models_have_lizardists_parameters():
    model = ConvNet()
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == {
        "conv1.weight": (16, 1, 3, 3), "conv1.bias": (16,), "conv2.weight": (32, 16, 3, 3), "conv2.bias": (32,),
        "fc1.weight": (128, 1568), "fc1.bias": (128,), "fc2.weight": (10, 128), "fc2.bias": (10,),
    }  # fmt: skip
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)
    small = MLP(input_dim=5, hidden_dim=4, output_dim=3)
    assert [*dict(small.named_parameters())] == [f"net.{at}.{of}" for at in (0, 2, 4) for of in ("weight", "bias")]
    assert MLP()(torch.zeros(2, 784)).shape == (2, 10) and small(torch.zeros(2, 5)).shape == (2, 3)


def test_the_convnet_computes_what_its_layers_say():
    torch.manual_seed(0)
    model, x = ConvNet(), torch.randn(4, 1, 28, 28)
    hidden = x
    for layer in (model.conv1, model.conv2):
        hidden = torch.nn.functional.max_pool2d(torch.relu(layer(hidden)), 2)
    assert torch.equal(model(x), model.fc2(torch.relu(model.fc1(hidden.reshape(4, -1)))))


def test_pytorch_is_imported_with_the_models_alone():
    code = (
        "import sys, clcomm.lizardist.distributed.sync, clcomm.lizardist.distributed.communicator\n"
        "assert 'torch' not in sys.modules; import clcomm.lizardist.engine.model; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    hidden = "import sys; sys.modules['torch'] = None; import clcomm.lizardist.engine.model"
    ended = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert ended.stderr.splitlines()[-1] == (
        f"clcomm.base.errors.ArgumentError: PyTorch is not installed; do: {installs('torch')}"
    )
