"""K columns of each row: the largest, those of a sparse teacher, and the mass outside of them."""
