"""How long a test waits for another process that may hang.

The limit ends a hang. It decides nothing else, because no process here takes a tenth of it, also on
one core that has other work.
"""

HANG = 1800  # seconds
