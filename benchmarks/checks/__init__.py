"""What it costs that ranks compare what they call."""
