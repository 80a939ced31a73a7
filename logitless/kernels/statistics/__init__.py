"""Statistics of a row of logits, and the gradient of any loss over them."""
