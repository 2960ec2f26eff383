"""`python -m onetrunk` is the command `onetrunk`."""

import sys

from onetrunk.cli import main

if __name__ == "__main__":
    sys.exit(main())
