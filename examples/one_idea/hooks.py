"""Idea: a function of yours reduces each bucket of gradients; here it sends halves and counts what it sent.

    mpiexec -n 2 python -m examples.one_idea.hooks

Look at: half as many bytes cross, and the model learns as before. `compression="fp16"` does this without a hook.
"""

import numpy as np
from sklearn.datasets import load_digits

from clcomm import Communicator, DistributedSampler, Synchronizer
from clcomm.engine import CrossEntropyLoss, Linear, ReLU, Sequential, Tensor
from clcomm.optim import SGD

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
sent = {"plain": 0, "halves": 0}


def in_halves(gradient, comm, out, bucket):
    """Average one bucket of all ranks' gradients in float16."""
    halves = gradient.astype(np.float16)
    out[:] = comm.all_reduce(halves, "mean")
    sent["plain"] += gradient.nbytes
    sent["halves"] += halves.nbytes


comm = Communicator(bucket_size="16KiB")
sync = Synchronizer(comm)
sync.register_comm_hook(in_halves)  # the same on every rank
model = Sequential(Linear(64, 128), ReLU(), Linear(128, 10))
sync.broadcast_parameters(model)
optimizer, loss_fn = SGD(model, lr=0.1, momentum=0.9), CrossEntropyLoss()
sampler = DistributedSampler(1500, comm.rank, comm.size)

for epoch in range(5):
    sampler.set_epoch(epoch)
    for batch in sampler.batches(25):
        loss = loss_fn(model(Tensor(images[batch])), Tensor(labels[batch]))
        loss.backward()
        sync.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

accuracy = (model(Tensor(images[1500:])).numpy().argmax(1) == labels[1500:]).mean()
print(f"rank {comm.rank}: sent {sent['halves']:,} of {sent['plain']:,} bytes; test accuracy {accuracy:.1%}")
