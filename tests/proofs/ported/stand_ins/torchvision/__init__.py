"""Stands for torchvision: drawn images, and transforms on NumPy's arrays, the same on both sides."""

from torchvision import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]
