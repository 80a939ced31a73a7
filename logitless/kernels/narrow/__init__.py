"""A head so narrow that its logits are never stored."""
