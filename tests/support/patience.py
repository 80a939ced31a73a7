"""The time that a test waits for another process that may hang.

The limit only ends a hang. Processes of the tests take less than a tenth of the limit, even on one
busy core.
"""

HANG = 1800  # seconds
