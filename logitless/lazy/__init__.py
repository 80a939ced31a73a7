"""Lazy logits, a tensor that is computed only when its values are read; and fused models."""
