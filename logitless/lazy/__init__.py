"""Fused models, and lazy logits, which are computed only when their values are read."""
