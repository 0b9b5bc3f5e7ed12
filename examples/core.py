"""Data-parallel training from first principles, with mpi4py and NumPy alone: `mpiexec -n 4 python -m examples.core`.

All of clcomm grows from two classes, a Communicator and a Synchronizer. Three ideas matter, marked IDEA: one start, one
mean, few calls. The program trains a network with gradients in buckets and one by one, and prints what both cost.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
from mpi4py import MPI

LAYERS = 64, 128, 128, 128, 10  # a network's widths: 8 parameters, 4 weights and 4 biases
STEPS, BATCH, RATE = 40, 96, 0.1  # the batch is that of all ranks together
MIB = 1 << 20


class Communicator:
    """The ranks of a job, and a count of what moves between them.

    Attributes:
        calls, nbytes, seconds: of each operation, by its name.
    """

    def __init__(self, comm: MPI.Intracomm = MPI.COMM_WORLD):
        self._comm = comm.Dup()  # so that no other library's messages can be taken for these
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def broadcast(self, array: np.ndarray) -> None:
        """Replace an array by rank 0's."""
        began = time.perf_counter()
        self._comm.Bcast(array, 0)
        self._count("broadcast", array, began)

    def all_reduce_mean(self, array: np.ndarray) -> None:
        """Replace an array by the mean of all ranks' arrays."""
        began = time.perf_counter()
        self._comm.Allreduce(MPI.IN_PLACE, array, MPI.SUM)
        array /= self.size  # without this line the learning rate would grow with the number of ranks
        self._count("all_reduce", array, began)

    def all_equal(self, text: str) -> bool:
        """Return whether all ranks pass the same text."""
        return len(set(self._comm.allgather(text))) == 1

    def _count(self, operation: str, array: np.ndarray, began: float) -> None:
        self.calls[operation] += 1
        self.nbytes[operation] += array.nbytes
        self.seconds[operation] += time.perf_counter() - began


class Synchronizer:
    """Keeps the ranks' copies of a model, the replicas, equal.

    Args:
        comm: the ranks.
        bucket_size: the bytes of one all-reduce; 0: each gradient is reduced on its own.
    """

    def __init__(self, comm: Communicator, bucket_size: int = MIB):
        self._comm, self._bucket_size = comm, bucket_size

    def broadcast_parameters(self, parameters: list[np.ndarray]) -> None:
        # IDEA 1, one start. Ranks may draw different numbers, or read a file that has changed between them: rank 0's
        # parameters count. Equal parameters that take equal steps stay equal, so they never travel again.
        for parameter in parameters:
            self._comm.broadcast(parameter)

    def sync_gradients(self, gradients: list[np.ndarray]) -> None:
        # IDEA 2, one mean. A loss is a mean over samples, and so is its gradient. Where ranks have equally many
        # samples, the mean of their gradients is the gradient of the whole batch: the ranks together take the step
        # that one process would take on all samples, each for a part of the work.
        for bucket in self._buckets(gradients):
            if len(bucket) == 1:
                self._comm.all_reduce_mean(bucket[0])
                continue
            flat = np.concatenate([gradient.ravel() for gradient in bucket])
            self._comm.all_reduce_mean(flat)
            ends = np.cumsum([gradient.size for gradient in bucket])
            for gradient, mean in zip(bucket, np.split(flat, ends[:-1]), strict=True):
                gradient[...] = mean.reshape(gradient.shape)

    def _buckets(self, gradients: list[np.ndarray]) -> list[list[np.ndarray]]:
        # IDEA 3, few calls. A call costs a latency, however little it moves, and a model has many small gradients.
        # Neighbours that share a call share its latency; the bytes, and the result, are the same.
        buckets: list[list[np.ndarray]] = []
        left = 0
        for gradient in gradients:
            if not buckets or gradient.nbytes > left:
                buckets.append([])
                left = self._bucket_size
            buckets[-1].append(gradient)
            left -= gradient.nbytes
        return buckets


class Network:
    """Fully connected layers with ReLU between them, and the mean cross-entropy as loss.

    Attributes:
        parameters: weight and bias of each layer, [inputs, outputs] and [outputs].
        gradients: of the loss, in the same order, from the last `backward`.
    """

    def __init__(self, seed: int):
        random = np.random.default_rng(seed)
        self.parameters: list[np.ndarray] = []
        for inputs, outputs in pairwise(LAYERS):
            weight = random.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs)
            self.parameters += [weight.astype(np.float32), np.zeros(outputs, np.float32)]
        self.gradients = [np.zeros_like(parameter) for parameter in self.parameters]

    def backward(self, x: np.ndarray, labels: np.ndarray) -> float:
        """Compute the gradients for some samples, [samples, inputs] and [samples], and return their loss."""
        weights, biases = self.parameters[::2], self.parameters[1::2]
        inputs = [x]
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            inputs.append(np.maximum(inputs[-1] @ weight + bias, 0))
        scores = inputs[-1] @ weights[-1] + biases[-1]
        scores -= scores.max(1, keepdims=True)
        log_probabilities = scores - np.log(np.exp(scores).sum(1, keepdims=True))
        samples = np.arange(len(x))
        loss = -log_probabilities[samples, labels].mean()
        error = np.exp(log_probabilities)
        error[samples, labels] -= 1
        error /= len(x)
        for layer in reversed(range(len(weights))):
            self.gradients[2 * layer][...] = inputs[layer].T @ error
            self.gradients[2 * layer + 1][...] = error.sum(0)
            error = (error @ weights[layer].T) * (inputs[layer] > 0)
        return float(loss)


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the training's batches, the same on all ranks: points, each labelled by the nearest of ten centres."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((LAYERS[-1], LAYERS[0]))
    points = random.standard_normal((STEPS, BATCH, LAYERS[0]))
    return [(x.astype(np.float32), ((x[:, None] - centres) ** 2).sum(2).argmin(1)) for x in points]


def train(comm: Communicator, bucket_size: int) -> tuple[Network, list[float]]:
    """Train a network on this rank's part of each batch; return it, and its loss on that part at each step."""
    if BATCH % comm.size:
        line = f"core: expected a number of ranks that divides the batch of {BATCH}, got {comm.size}"
        raise SystemExit(1 if comm.rank else line)
    part = BATCH // comm.size
    own = slice(comm.rank * part, (comm.rank + 1) * part)
    network = Network(seed=comm.rank)  # another network on each rank, until they are broadcast
    sync = Synchronizer(comm, bucket_size)
    sync.broadcast_parameters(network.parameters)
    losses = []
    for x, labels in batches():
        losses.append(network.backward(x[own], labels[own]))
        sync.sync_gradients(network.gradients)
        for parameter, gradient in zip(network.parameters, network.gradients, strict=True):
            parameter -= RATE * gradient
    return network, losses


def fingerprint(network: Network) -> str:
    """Return a hash of a network's parameters: equal for equal bits."""
    return hashlib.sha256(b"".join(parameter.tobytes() for parameter in network.parameters)).hexdigest()


def table(bucketed: Communicator, single: Communicator) -> str:
    """Return what the gradients' all-reduces of two trainings cost, side by side."""
    lines = [f"{'':22} {'bucketed':>12} {'per tensor':>12} {'ratio':>8}"]
    for name, figure in {
        "Average bytes/call": lambda comm: comm.nbytes["all_reduce"] / comm.calls["all_reduce"],
        "Total all-reduce calls": lambda comm: comm.calls["all_reduce"],
        "Total bytes sent": lambda comm: comm.nbytes["all_reduce"],
        "Milliseconds in them": lambda comm: 1e3 * comm.seconds["all_reduce"],
    }.items():
        left, right = figure(bucketed), figure(single)
        lines.append(f"{name:22} {left:12,.0f} {right:12,.0f} {left / right:8.3g}")
    return "\n".join(lines)


def main() -> None:
    bucketed, single = Communicator(), Communicator()
    network, losses = train(bucketed, MIB)
    other, _ = train(single, 0)
    hashes = fingerprint(network), fingerprint(other)
    equal = bucketed.all_equal(hashes[0]) and single.all_equal(hashes[1])
    if bucketed.rank == 0:
        print(f"{bucketed.size} ranks, {STEPS} steps: loss {losses[0]:.3f} to {losses[-1]:.3f} on rank 0's samples")
        print(table(bucketed, single))
        print(f"replicas equal: {equal}; SHA-256 {hashes[0][:16]} bucketed, {hashes[1][:16]} per tensor")


if __name__ == "__main__":
    main()
