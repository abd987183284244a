"""`python -m jitney`: the program, where its script is not on the path."""

import sys

from jitney.engine.cli import main

if __name__ == "__main__":
    sys.exit(main())
