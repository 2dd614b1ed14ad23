"""``python -m lightning_swarm``: the command `lightning-swarm`."""

import sys

from lightning_swarm.cli import main

if __name__ == "__main__":
    sys.argv[0] = "lightning-swarm"  # as it is to be typed, for what help texts say
    sys.exit(main())
