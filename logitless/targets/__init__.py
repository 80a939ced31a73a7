"""What a sparse teacher says: K ids per row and their log-probabilities."""
