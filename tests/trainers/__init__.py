"""Tests of trainers of other libraries over fused models. `make test-trainers` runs them."""
