"""Output for people: the terminal, its width, and tables that fit it."""
