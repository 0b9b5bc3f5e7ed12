"""A training loop of your own: `mpiexec -n 2 python -m examples.loop`."""

import numpy as np
from sklearn.datasets import load_digits

from clcomm import Communicator, DistributedSampler, Synchronizer
from clcomm.engine import CrossEntropyLoss, Linear, ReLU, Sequential, Tensor
from clcomm.optim import SGD

TRAIN, BATCH = 1500, 25  # of the 1,797 handwritten digits; the others test

images, labels = load_digits(return_X_y=True)  # rows of 8x8 pixels from 0 to 16
images = (images / 16).astype(np.float32)

comm = Communicator(bucket_size="16KiB")  # mpiexec's ranks; without mpiexec, a world of one
sync = Synchronizer(comm)
model = Sequential(Linear(64, 128), ReLU(), Linear(128, 10))
sync.broadcast_parameters(model)  # every rank starts with rank 0's
optimizer, loss_fn = SGD(model, lr=0.1, momentum=0.9), CrossEntropyLoss()
sampler = DistributedSampler(TRAIN, comm.rank, comm.size)

for epoch in range(20):
    sampler.set_epoch(epoch)
    for batch in np.split(sampler.indices(), range(BATCH, len(sampler), BATCH)):
        loss = loss_fn(model(Tensor(images[batch])), Tensor(labels[batch]))
        loss.backward()
        sync.sync_gradients(model)  # gradients are now the mean over all ranks
        optimizer.step()
        optimizer.zero_grad()

predicted = model(Tensor(images[TRAIN:])).numpy().argmax(1)
accuracy = (predicted == labels[TRAIN:]).mean()
print(f"rank {comm.rank} of {comm.size}: test accuracy {accuracy:.1%}", sync.get_communication_stats())
