"""Sparse targets: a teacher's K ids per row and their log-probabilities."""
