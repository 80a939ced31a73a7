"""Sparse targets: a teacher's K ids per row and their log-probabilities.

sparse.py defines SparseTargets. checks.py contains its checks, and safetensors.py its file format.
"""
