"""LizarDist's package for logging."""
