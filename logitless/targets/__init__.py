"""Sparse targets: a teacher's K ids per row and their log-probabilities.

sparse.py has SparseTargets, checks.py its checks, and safetensors.py its file format.
"""
