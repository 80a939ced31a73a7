"""Evaluation of losses: losses as data, sources of logits, and backends."""
