"""`ll.hf.use_in_trl` (adapter.py), which lets TRL's trainers use the losses of this library."""
