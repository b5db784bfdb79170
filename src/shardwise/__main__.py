"""`python -m shardwise` is the command `shardwise`, for launchers that start Python modules."""

import sys

from shardwise.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
