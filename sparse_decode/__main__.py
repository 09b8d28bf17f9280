"""Runs the command line."""

import sys

from sparse_decode.cli import main

if __name__ == "__main__":
    sys.exit(main())
