"""What LizarDist has for communication."""
