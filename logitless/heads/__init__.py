"""Losses over a linear head. If the logits are large, they are never materialised as a whole."""
