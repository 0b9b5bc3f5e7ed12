"""Idea: any model of NumPy arrays trains on several ranks if it has named parameters with `data` and `grad`.

    mpiexec -n 2 python -m examples.one_idea.numpy_model

Look at: forward and backward are plain NumPy; two lines of the Synchronizer make it data-parallel.
"""

from types import SimpleNamespace

import numpy as np

from clcomm import Communicator, Synchronizer


class Regression:
    """A linear regression, and the gradients of its mean squared error."""

    def __init__(self, inputs: int):
        self.weight = SimpleNamespace(data=np.zeros(inputs, np.float32), grad=None)
        self.bias = SimpleNamespace(data=np.zeros(1, np.float32), grad=None)

    def named_parameters(self):
        return [("weight", self.weight), ("bias", self.bias)]

    def backward(self, x, y):
        error = x @ self.weight.data + self.bias.data - y
        self.weight.grad, self.bias.grad = 2 * error @ x / len(y), np.full(1, 2 * error.mean(), np.float32)
        return float((error**2).mean())


with Communicator() as comm:
    model, sync = Regression(8), Synchronizer(comm)
    sync.broadcast_parameters(model)
    random = np.random.default_rng(comm.rank)
    truth = np.arange(8, dtype=np.float32)
    for _ in range(100):
        x = random.standard_normal((32, 8), np.float32)
        loss = model.backward(x, x @ truth + 1)
        sync.sync_gradients(model)  # each gradient is now the mean over the ranks
        for _, parameter in model.named_parameters():
            parameter.data -= 0.1 * parameter.grad
    print(f"rank {comm.rank} of {comm.size}: loss {loss:.1e}, weights {np.round(model.weight.data, 2).tolist()}")
