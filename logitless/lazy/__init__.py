"""`fuse`, and the lazy logits of fused models, which are computed only when they are read."""
