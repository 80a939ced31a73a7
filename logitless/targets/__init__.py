"""Sparse targets: a teacher's K ids per row and their log-probabilities.

sparse.py defines SparseTargets. sparse_checks.py checks the tensors of SparseTargets.
safetensors.py reads and writes files.
"""
