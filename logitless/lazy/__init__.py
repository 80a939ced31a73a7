"""Lazy logits, which are computed only when their values are read, and fused models."""
