"""TRL's trainers with the losses of this library: `ll.hf.use_in_trl` (adapter.py)."""
