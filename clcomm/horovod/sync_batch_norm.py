"""Batch normalisation over all ranks' batches (S. Ioffe and C. Szegedy, 2015; Horovod's SyncBatchNorm)."""

from __future__ import annotations

import torch

from clcomm.horovod import world
from clcomm.horovod.all_reduces import allreduce
from clcomm.horovod.calls import Sum


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """BatchNorm with the mean and variance of all ranks' batches in training; arguments as for torch's BatchNorm2d.

    Its forward and backward are collective. Raises ValueError on every rank where all of them together have one value
    for each channel.
    """

    def _check_input_dim(self, values: torch.Tensor) -> None:
        if values.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {values.dim()}")

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the normalised values, (batch, channels, ...)."""
        self._check_input_dim(values)
        by_batch = self.training or not self.track_running_stats
        if not by_batch or world.size() == 1:
            return super().forward(values)
        axes = [axis for axis in range(values.dim()) if axis != 1]
        wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
        count = wide.new_full((1,), values.numel() // values.shape[1])
        totals = allreduce(torch.cat([count, wide.sum(axes)]), op=Sum, name="batch norm mean")
        count, mean = totals[0].detach(), totals[1:] / totals[0].detach()
        if count <= 1:
            raise ValueError(f"expected more than 1 value per channel when training, got input size {values.shape}")
        shape = [1, -1, *[1] * (values.dim() - 2)]
        centred = wide - mean.reshape(shape)
        variance = allreduce((centred * centred).sum(axes), op=Sum, name="batch norm variance") / count
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach() * count / (count - 1))
        normal = (centred * torch.rsqrt(variance + self.eps).reshape(shape)).to(values.dtype)
        return normal if not self.affine else normal * self.weight.reshape(shape) + self.bias.reshape(shape)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.num_batches_tracked is not None and self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)
