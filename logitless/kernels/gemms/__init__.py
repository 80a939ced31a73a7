"""Matrix products that PyTorch does not have."""
