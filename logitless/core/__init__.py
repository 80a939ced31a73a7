"""How a loss is evaluated: a loss as data, the sources that evaluate it, and the backends."""
