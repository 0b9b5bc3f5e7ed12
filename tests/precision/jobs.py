"""Models stored in 16 bits, and the same computed with float32."""

from __future__ import annotations

import numpy as np

from clcomm.base.host.arrays import from_bfloat16, to_bfloat16
from clcomm.engine import Tensor
from tests.sharded_jobs import KINDS, Job

PRECISIONS = ("bf16", "fp16")


def rounded(values: np.ndarray, precision: str) -> np.ndarray:
    """Return float32 values as they are stored."""
    if precision == "bf16":
        return from_bfloat16(to_bfloat16(values)).reshape(values.shape)
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


class TwoModels(Job):
    """The reference: a model in float32 trains, and another one computes its gradients with its rounded values."""

    def __init__(self, comm, kind, precision, **options):
        super().__init__(comm, kind, sharded=False, **options)
        self.precision, self.rounding = precision, Job(comm, kind, sharded=False, **options)
        self._round()  # masters start from what is stored
        self.model.load_state_dict(self.rounding.model.state_dict())

    def _round(self) -> None:
        state = {name: rounded(values, self.precision) for name, values in self.model.state_dict().items()}
        self.rounding.model.load_state_dict(state)

    def backward(self, number, micro=0, share=1.0):
        self.rounding.backward(number, micro, share)

    def step(self, number, micro_batches=1):
        for micro in range(micro_batches):
            self.backward(number, micro, 1 / micro_batches)
        gradients = dict(self.rounding.model.named_parameters())
        self.rounding.sync.sync_gradients(self.rounding.model)
        for name, parameter in self.model.named_parameters():
            parameter.grad = Tensor(gradients[name].grad.numpy(), self.device)
        self.optimizer.step()
        self._round()
        self.rounding.optimizer.zero_grad()
        self.optimizer.zero_grad()

    def run(self, steps, start=0, **options):
        super().run(steps, start, **options)
        return self.rounding.model.state_dict()


__all__ = ["KINDS", "PRECISIONS", "Job", "TwoModels", "rounded"]
