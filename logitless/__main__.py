"""`python -m logitless` runs the `logitless` command (cli/)."""

import sys

from logitless.cli import main

sys.exit(main())
