"""Optimizers with PyTorch's formulas and defaults: one kernel launch for each step, over all parameters at once.

A missing gradient counts as zeros, as it does between ranks; a step without any gradient does nothing. Frozen
parameters do not change.
"""

from clcomm.optim import lr_scheduler
from clcomm.optim.algorithms import SGD, Adadelta, Adagrad, Adam, AdamW, RAdam, RMSProp, RMSprop
from clcomm.optim.optimizer import Optimizer

__all__ = ["SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Optimizer", "RAdam", "RMSProp", "RMSprop", "lr_scheduler"]
