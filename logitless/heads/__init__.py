"""Losses over a linear head, whose large logits are never materialised as a whole."""
