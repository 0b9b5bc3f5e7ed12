"""Idea: netcl's own kernels compute, and clcomm averages the gradients between the ranks' devices.

    mpiexec -n 2 python -m examples.one_idea.netcl_model          # pip install 'clcomm[netcl]'

Look at: the network is a plain netcl module; the adapter's lines are marked.
"""

import numpy as np
from sklearn.datasets import load_digits

from clcomm import Communicator, Synchronizer
from clcomm.sync.adapters.netcl import NetclModel, cross_entropy, prepare
from clcomm.sync.adapters.netcl_optim import NetclOptimizer

device = prepare()  # the adapter: this rank's device, before netcl is imported
from netcl import nn  # noqa: E402

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)


class Network(nn.Module):
    def __init__(self, queue):
        self.fc1, self.fc2, self.relu = nn.Linear(queue, 64, 32), nn.Linear(queue, 32, 10), nn.ReLU()

    def forward(self, x):
        return self.fc2(self.relu(self.fc1(x)))


comm = Communicator()
sync = Synchronizer(comm)
model = NetclModel(Network(device.queue))  # the adapter
sync.broadcast_parameters(model)
optimizer = NetclOptimizer(model, "sgd", 0.1, momentum=0.9)

for start in range(0, 1200, 100):
    batch = np.arange(start + comm.rank, start + 100, comm.size)
    loss = cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    sync.sync_gradients(model)  # netcl's gradients are now the mean over all ranks
    optimizer.step()
    optimizer.zero_grad()

print(f"rank {comm.rank} of {comm.size}: loss {loss.item():.3f}, {sync.get_communication_stats()}")
