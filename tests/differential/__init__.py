"""Every public function against its definition, over every source, by each implementation.

A case is plain data: a function, shapes, a dtype, and for each argument the name of a kind of value
(case.py). Its tensors follow from its seed. check.py runs it and holds

- a plain tensor, eager, against the fp64 oracle: value, and gradients of a random upstream one;
- any other source or implementation against the same, and where the oracle says nothing (NaN and
  what follows from it) against the plain tensor;
- a bad argument against itself: the same type and words of refusal everywhere.

A new function is one line in functions.py, a new source one line in sources.py.

    make fuzz ARGS="--minutes 10"     as many cases as fit, counted by function
    make mutants                      bugs put in on purpose, which tests must find (mutations.py)
"""

import os

from tests.support.sizes import ON_GPU

if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
