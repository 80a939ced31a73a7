"""Helpers for the tests of several rooms: references, laws, random inputs, ranks and processes."""
