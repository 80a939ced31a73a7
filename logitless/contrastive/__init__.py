"""Contrastive losses over all pairs of two sets of embeddings, also over several ranks."""
