"""The models that the examples train, built only on clcomm.engine."""

from models.convnet import ConvNet
from models.gpt import GPT
from models.lenet import LeNet
from models.mlp import MLP
from models.resnet import ResNet

__all__ = ["GPT", "MLP", "ConvNet", "LeNet", "ResNet"]
