"""Losses and statistics: the public functions that users call."""
