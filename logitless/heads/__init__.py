"""Logits of a linear head that are never materialised as a whole."""
