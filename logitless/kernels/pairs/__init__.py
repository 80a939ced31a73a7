"""Losses that compare two rows of logits, a student's and a teacher's."""
