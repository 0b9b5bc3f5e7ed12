"""Training data: found, downloaded, checked, split over ranks, and served in batches."""
