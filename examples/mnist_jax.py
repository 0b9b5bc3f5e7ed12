"""A ConvNet on MNIST with JAX and Optax: `mpiexec -n 2 python -m examples.mnist_jax`.

A step is one jitted program: forward, backward, the mean of the ranks' gradients, and Adam's update.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import numpy as np

from clcomm import Communicator, DistributedSampler
from clcomm.base.console.option_types import OneLineParser, whole_number
from clcomm.comm.watch.endings import run
from clcomm.jax import all_reduce, broadcast, sync  # before JAX's first array
from training.data.choose import choose, load

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import optax  # isort: skip

_CONVOLVE = partial(jax.lax.conv_general_dilated, padding="SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))


def main() -> None:
    options, comm = parse(), Communicator()
    splits = load(choose(options.data, report=lambda line: None))
    assert splits.test is not None
    params = broadcast(initial(splits.train.image_shape), comm=comm)
    optimizer = optax.adam(1e-3)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        grads = sync(jax.grad(loss)(params, images, labels), bucket_size=options.bucket_size, comm=comm)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def right(params: Any, images: Any, labels: Any) -> Any:
        return all_reduce((logits(params, images).argmax(1) == labels).sum(), comm=comm)

    sampler = DistributedSampler(len(splits.train), comm.rank, comm.size, drop_last=True)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        begin, steps = time.perf_counter(), min(len(sampler) // options.batch_size, options.max_steps)
        for batch in np.split(sampler.indices()[: steps * options.batch_size], steps):
            params, state = step(params, state, *splits.train.batch(batch))
        jax.block_until_ready(params)
        speed = steps * options.batch_size * comm.size / (time.perf_counter() - begin)
        mine = np.arange(len(splits.test) // comm.size) + comm.rank * (len(splits.test) // comm.size)
        found = int(right(params, *splits.test.batch(mine)))
        if comm.rank == 0:
            accuracy = found / (len(mine) * comm.size)
            print(f"epoch {epoch + 1}, {comm.size} ranks: {speed:,.0f} images/s, test accuracy {accuracy:.1%}")


def initial(image: tuple[int, ...]) -> dict[str, Any]:
    """Return the network's weights; images of 28 by 28 pixels, or of another size that 4 divides."""
    channels, height, width = image
    shapes = {"conv1": (16, channels, 3, 3), "conv2": (32, 16, 3, 3), "dense": (32 * (height // 4) * (width // 4), 10)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.nn.initializers.he_normal(0 if name == "dense" else 1, 1 if name == "dense" else 0)(key, shape)
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    } | {"bias": jnp.zeros(10)}


def logits(params: dict[str, Any], x: Any) -> Any:
    for name in ("conv1", "conv2"):
        x = jax.nn.relu(_CONVOLVE(x, params[name], (1, 1)))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return x.reshape(len(x), -1) @ params["dense"] + params["bias"]


def loss(params: dict[str, Any], images: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


def parse() -> argparse.Namespace:
    parser = OneLineParser(prog="python -m examples.mnist_jax", description="A ConvNet on MNIST with JAX and Optax.")
    parser.add_argument("--data", default="auto", help="auto, mnist, digits, synthetic or a folder; default: auto")
    parser.add_argument("--epochs", type=whole_number(1), default=1, help="default: %(default)s")
    parser.add_argument("--batch-size", type=whole_number(1), default=64, help="of a rank; default: %(default)s")
    parser.add_argument("--bucket-size", default="1MiB", help="default: %(default)s")
    parser.add_argument("--max-steps", type=whole_number(1), default=10**9, help="of an epoch; default: all")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
