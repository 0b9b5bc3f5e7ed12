"""netcl's `optim`."""

from clcomm.optim import SGD, Adam, AdamW, RMSProp

__all__ = ["SGD", "Adam", "AdamW", "RMSProp"]
