"""Optimizers with PyTorch's formulas and defaults: one kernel launch for each step, over all parameters at once.

Parameters that are frozen, or of which no rank has a gradient, do not change, nor does their state.
"""

from clcomm.optim import lr_scheduler
from clcomm.optim.algorithms import SGD, Adadelta, Adagrad, Adam, AdamW, RAdam, RMSProp, RMSprop
from clcomm.optim.optimizer import Optimizer

__all__ = ["SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Optimizer", "RAdam", "RMSProp", "RMSprop", "lr_scheduler"]
