"""What the ranks divide between them: the update, and from stage 2 of ZeRO on gradients and parameters."""
