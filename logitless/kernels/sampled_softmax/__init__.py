"""Sampled softmax: the columns that are drawn, and the rows of the table that they need."""
