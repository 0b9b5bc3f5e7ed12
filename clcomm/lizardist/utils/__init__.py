"""What LizarDist has for messages."""
