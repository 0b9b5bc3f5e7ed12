"""LizarDist's package for communication."""
