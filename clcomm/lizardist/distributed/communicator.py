"""LizarDist's Communicator: clcomm's, which accepts LizarDist's positional arguments too."""

from clcomm.communicator import Communicator

__all__ = ["Communicator"]
