"""`python -m lumen` is `lumen`."""

import sys

from lumen.cli import main

if __name__ == "__main__":
    sys.exit(main())
