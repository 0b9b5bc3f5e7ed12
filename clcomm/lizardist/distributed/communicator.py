"""LizarDist's Communicator: clcomm's, which takes its arguments by position too."""

from clcomm.communicator import Communicator

__all__ = ["Communicator"]
