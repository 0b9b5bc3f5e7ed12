"""An MLP on a table that comes with scikit-learn: `mpiexec -n 2 python -m examples.tabular --data wine`.

The rows need not divide by the ranks and batches: ranks that run out of batches join in the others' steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn import datasets

from clcomm import Communicator, DistributedSampler
from clcomm.base.console.option_types import OneLineParser, whole_number
from clcomm.engine import GELU, CrossEntropyLoss, LayerNorm, Linear, MSELoss, Sequential, Tensor, manual_seed
from clcomm.optim import AdamW
from clcomm.parallel import DistributedDataParallel

#: Each table, and whether its targets are numbers instead of classes.
TABLES: dict[str, tuple[Callable[..., Any], bool]] = {
    "breast_cancer": (datasets.load_breast_cancer, False),
    "diabetes": (datasets.load_diabetes, True),
    "iris": (datasets.load_iris, False),
    "wine": (datasets.load_wine, False),
}
BATCH, HIDDEN, HELD_OUT = 16, 32, 0.2


def main() -> None:
    options, comm = parse(), Communicator()
    load, has_numbers = TABLES[options.data]
    rows, targets = load(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(rows))
    train, test = np.split(order, [round(len(rows) * (1 - HELD_OUT))])
    rows = standardised(rows, train)
    targets = standardised(targets[:, None], train) if has_numbers else targets.astype(np.int32)

    manual_seed(0)
    outputs = 1 if has_numbers else int(targets.max()) + 1
    model = Sequential(Linear(rows.shape[1], HIDDEN), LayerNorm(HIDDEN), GELU(), Linear(HIDDEN, outputs))
    ddp, loss_fn = DistributedDataParallel(model, comm), MSELoss() if has_numbers else CrossEntropyLoss()
    optimizer = AdamW(model, lr=2e-3, weight_decay=0.05)
    sampler = DistributedSampler(len(train), comm.rank, comm.size, pad=False)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        with ddp.join(step=optimizer.step):
            for batch in np.split(train[sampler.indices()], range(BATCH, len(sampler), BATCH)):
                loss = loss_fn(ddp(Tensor(rows[batch])), Tensor(targets[batch]))
                loss.backward()
                ddp.finish_grad_sync(samples=len(batch))
                optimizer.step()
                optimizer.zero_grad()

    predicted = model(Tensor(rows[test])).numpy()
    if comm.rank == 0:
        found = score(predicted, targets[test], has_numbers)
        print(f"{options.data}: {len(train)} rows of {rows.shape[1]} columns; {found}")


def parse() -> argparse.Namespace:
    parser = OneLineParser(prog="python -m examples.tabular", description="An MLP on a table of scikit-learn's.")
    parser.add_argument("--data", choices=TABLES, default="breast_cancer", help="default: %(default)s")
    parser.add_argument("--epochs", type=whole_number(1), default=20, help="default: %(default)s")
    return parser.parse_args()


def standardised(values: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Return columns less their mean over their standard deviation, both of the training rows."""
    spread = values[train].std(0)
    return ((values - values[train].mean(0)) / np.where(spread, spread, 1)).astype(np.float32)


def score(predicted: np.ndarray, targets: np.ndarray, has_numbers: bool) -> str:
    """Return the accuracy on held-out rows, or for numbers the share of their variance that is explained."""
    if not has_numbers:
        return f"test accuracy {(predicted.argmax(1) == targets).mean():.1%}"
    return f"test R^2 {1 - ((predicted - targets) ** 2).sum() / ((targets - targets.mean()) ** 2).sum():.3f}"


if __name__ == "__main__":
    main()
