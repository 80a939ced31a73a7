"""Sparse targets: a teacher's K ids per row and their log-probabilities.

SparseTargets is defined in sparse.py, and its tensors are checked in sparse_checks.py. The module
safetensors.py reads and writes files.
"""
