"""Evaluation of losses: the base class of losses, sources of logits, and the choice of backend."""
