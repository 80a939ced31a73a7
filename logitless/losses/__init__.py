"""What is computed: the functions that users call."""
