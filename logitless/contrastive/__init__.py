"""Contrastive losses over all pairs of two sets of embeddings, on one rank or on several ranks."""
