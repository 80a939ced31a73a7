"""Trainers of other libraries with our losses. Each module imports its library alone."""
