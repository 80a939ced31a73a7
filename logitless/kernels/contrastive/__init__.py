"""Losses over the similarities of all pairs of embeddings."""
