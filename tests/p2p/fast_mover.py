"""Runs `lightning-swarm` in a process whose server checks about every second whether to move."""

import functools
import sys

from lightning_swarm.cli import main
from lightning_swarm.serving import placement

placement.MovePolicy = functools.partial(placement.MovePolicy, look_s=1.0)  # type: ignore[assignment,misc]
sys.exit(main())
