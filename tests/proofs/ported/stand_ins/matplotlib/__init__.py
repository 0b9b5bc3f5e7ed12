"""Stands for Matplotlib: nothing is drawn."""


def use(backend):
    pass
