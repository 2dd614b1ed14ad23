"""What a process shows of this package's log: what its script configures, unless whoever starts it asks for more."""

from __future__ import annotations

import logging
import os
from typing import Final

from lightning_swarm.errors import ConfigError

LOG: Final = "SWARM_LOG"
"""From which level on this package's log goes to stderr, whatever the script says; its children inherit it."""

_LEVELS: Final = ("debug", "info", "warning", "error")


def follow_environment() -> None:
    """Show the log as the environment says; nothing is changed if it says nothing.

    Raises:
        ConfigError: It names no level.
    """
    level = os.environ.get(LOG)
    if not level:
        return
    if level not in _LEVELS:
        raise ConfigError(f"the variable {LOG} must be one of {', '.join(_LEVELS)}, got {level!r}. Set one, or none.")
    logger = logging.getLogger("lightning_swarm")
    logger.setLevel(level.upper())
    if not logger.hasHandlers():  # else the script has said where logs go
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
