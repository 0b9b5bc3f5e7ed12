"""The models the examples train, built on clcomm.engine alone."""

from models.convnet import ConvNet
from models.mlp import MLP

__all__ = ["MLP", "ConvNet"]
