"""What the repository builds on clcomm to train: data, loader, schedules, trainer."""
