"""``python -m lightning_swarm``: the command `lightning-swarm`."""

import sys

from lightning_swarm.cli import main

if __name__ == "__main__":
    sys.argv[0] = "lightning-swarm"  # the command's name in help texts
    sys.exit(main())
