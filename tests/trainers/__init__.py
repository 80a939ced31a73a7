"""Trainers of other libraries over fused models: `make test-trainers`."""
