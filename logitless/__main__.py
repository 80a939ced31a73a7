"""Runs the `logitless` command (cli/) for `python -m logitless`."""

import sys

from logitless.cli import main

sys.exit(main())
