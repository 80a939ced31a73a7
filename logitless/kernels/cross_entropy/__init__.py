"""Cross-entropy: its gradient in the same pass, and its value with smoothing and z-loss."""
