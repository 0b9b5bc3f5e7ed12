"""PyTorch as an engine of the Trainer: the models, with their state as host arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from clcomm.base.errors import ArgumentError, CheckpointError, DeviceError
from clcomm.base.host import variables
from clcomm.sync.adapters.torch import TorchAdapter


class MLP(nn.Module):
    """Images [N, C, H, W] -> logits [N, classes], through two hidden layers of 128 with ReLU."""

    def __init__(self, in_shape: tuple[int, ...], classes: int):
        super().__init__()
        self.fc1 = nn.Linear(math.prod(in_shape), 128)
        self.fc2 = nn.Linear(128, 128)
        self.fc3 = nn.Linear(128, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))


class ConvNet(nn.Module):
    """Images [N, C, H, W] -> logits [N, classes]: twice 3x3 convolution, ReLU and 2x2 max-pool, then two layers."""

    def __init__(self, in_shape: tuple[int, ...], classes: int):
        super().__init__()
        channels, height, width = in_shape
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * (height // 4) * (width // 4), 128)
        self.fc2 = nn.Linear(128, classes)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


class LeNet(nn.Module):
    """Images [N, C, H, W] -> logits [N, classes]: twice 5x5 convolution, ReLU and 2x2 max-pool, then three layers."""

    def __init__(self, in_shape: tuple[int, ...], classes: int):
        super().__init__()
        channels, height, width = in_shape
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2), 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))


class BasicBlock(nn.Module):
    """x [N, channels, H, W] -> [N, width, H / stride, W / stride]: two 3x3 convolutions, and a way around them."""

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != width:
            self.downsample = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        around = x if self.downsample is None else self.downsample(x)
        x = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(x)) + around)


class ResNet(nn.Module):
    """Images [N, C, H, W] -> logits [N, classes]: models.ResNet, layer by layer."""

    def __init__(self, in_shape: tuple[int, ...], classes: int, blocks: Sequence[int] = (2, 2, 2, 2), width: int = 64):
        super().__init__()
        self.conv1 = nn.Conv2d(in_shape[0], width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        channels, self.stages = width, len(blocks)
        for stage, count in enumerate(blocks):
            layers = []
            for number in range(count):
                layers.append(BasicBlock(channels, width << stage, 2 if stage and not number else 1))
                channels = width << stage
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layers))
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(x.mean((2, 3)))


_MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "mlp": MLP, "convnet": ConvNet, "lenet": LeNet, "resnet": ResNet,
}  # fmt: skip
#: The smallest height and width of their images.
_LEAST_SIDE = {"convnet": 4, "lenet": 12}


def make_module(model: str, in_shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """Return the model of a name with the initial values of `torch.manual_seed(seed)`."""
    least = _LEAST_SIDE.get(model, 1)
    if least > 1 and (len(in_shape) != 3 or min(in_shape[1:]) < least):
        raise ArgumentError(
            f"in_shape: expected (channels, height, width) of at least {least} x {least}, got {in_shape}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _MODELS[model](in_shape, classes)


def choose_device(spec: str | None, local_rank: int, cores: int | None) -> torch.device:
    """Return PyTorch's device for "cpu", "gpu" or "gpu:1"; None: CLCOMM_DEVICE, else a GPU by local rank, else the CPU.

    On the CPU, PyTorch then uses `cores` threads in this process. Raises DeviceError if there is no such device.
    """
    spec = variables.text("CLCOMM_DEVICE") or None if spec is None else spec
    count = torch.cuda.device_count()
    kind, _, index = (spec or ("gpu" if count else "cpu")).lower().partition(":")
    if kind == "cpu":
        if cores is not None:
            torch.set_num_threads(max(1, int(cores)))
        return torch.device("cpu")
    number = int(index) if index.isdigit() else local_rank % max(count, 1)
    if kind != "gpu" or number >= count:
        present = ", ".join(["cpu", *(f"gpu:{i}" for i in range(count))])
        raise DeviceError(f"device={spec!r}: expected one of PyTorch's devices here: {present}")
    return torch.device("cuda", number)


class TorchModel:
    """A module whose state is set and returned as host arrays by name."""

    def __init__(self, module: nn.Module, device: torch.device):
        self.module, self._device = module, device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def as_adapter(self) -> TorchAdapter:
        """Return the adapter through which the Synchronizer sees the module."""
        return TorchAdapter(self.module)

    def named_parameters(self) -> Any:
        """Yield (name, parameter)."""
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return a copy of parameters and buffers by name."""
        return {name: np.array(tensor.cpu().numpy()) for name, tensor in self.module.state_dict().items()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Set what `state_dict` returned; raises ArgumentError for other names or shapes."""
        try:
            self.module.load_state_dict({name: torch.tensor(array) for name, array in state.items()})
        except RuntimeError as error:
            raise ArgumentError(" ".join(str(error).split())) from None

    def prepare(self, images: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch as tensors on the device."""
        x = torch.tensor(images, dtype=torch.float32, device=self._device)
        return x, torch.tensor(labels, dtype=torch.int64, device=self._device)

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return the logits of a batch, without recording for backward, in eval mode."""
        was_training = self.module.training
        self.module.eval()
        with torch.no_grad():
            logits = self.module(torch.tensor(images, dtype=torch.float32, device=self._device)).cpu().numpy()
        self.module.train(was_training)
        return logits


class TorchLoss:
    """A loss whose `backward` takes a weight for the gradients."""

    def __init__(self, value: torch.Tensor):
        self.value = value

    def item(self) -> float:
        """Return the loss as a number."""
        return self.value.item()

    def backward(self, weight: float = 1.0) -> None:
        """Add the gradients, times `weight`."""
        self.value.backward(torch.full_like(self.value, weight))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> TorchLoss:
    """Return the batch's mean cross-entropy of logits (N, classes) and labels (N,)."""
    return TorchLoss(nn.functional.cross_entropy(logits, labels))


class TorchOptimizer:
    """An optimizer of `torch.optim` by name: "sgd", "adam", "adamw" or "rmsprop"; raises ArgumentError for others.

    `weight_decay` None means PyTorch's default; `momentum` is for sgd and rmsprop, `nesterov` for sgd.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        lr: float,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float | None = None,
    ):
        self._parameters = dict(module.named_parameters())
        kinds: dict[str, Any] = {
            "sgd": torch.optim.SGD,
            "adam": torch.optim.Adam,
            "adamw": torch.optim.AdamW,
            "rmsprop": torch.optim.RMSprop,
        }
        if name not in kinds:
            raise ArgumentError(f"optimizer: expected {', '.join(kinds)}, got {name!r}")
        settings: dict[str, Any] = {} if weight_decay is None else {"weight_decay": weight_decay}
        settings |= {"momentum": momentum} if name in ("sgd", "rmsprop") else {}
        settings |= {"nesterov": nesterov} if name == "sgd" else {}
        self._optimizer = kinds[name](self._parameters.values(), lr=lr, **settings)
        self.kind = type(self._optimizer).__name__

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._optimizer.param_groups[0]["lr"]

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = value

    def step(self) -> None:
        """Update the parameters that have a gradient."""
        self._optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the state by kind and parameter ("momentum_buffer/fc1.weight")."""
        state = {"kind": np.array(self.kind)}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state[parameter].items():
                if value is not None:
                    state[f"{key}/{name}"] = np.array(value.cpu().numpy())
        return state

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Set what `state_dict` returned; raises CheckpointError, before any change, if it is another optimizer's."""
        if str(state.get("kind")) != self.kind:
            raise CheckpointError(f"optimizer state: expected that of {self.kind}, got that of {state.get('kind')}")
        loaded: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self._parameters}
        for entry, array in state.items():
            if entry == "kind":
                continue
            key, _, name = entry.partition("/")
            parameter = self._parameters.get(name)
            if parameter is None or np.shape(array) not in ((), tuple(parameter.shape)):
                raise CheckpointError(f"optimizer state: {entry!r} of shape {np.shape(array)} fits no parameter")
            if np.asarray(array).dtype.kind not in "fiub" or (key == "step" and not np.all(np.asarray(array) >= 0)):
                raise CheckpointError(f"optimizer state: {entry!r}: expected numbers, steps from 0 up")
            # By default torch.optim keeps step counts on the host, wherever the parameter is.
            place = "cpu" if key == "step" else parameter.device
            loaded[name][key] = torch.tensor(array, device=place)
        for name, entries in loaded.items():
            self._optimizer.state[self._parameters[name]] = entries
