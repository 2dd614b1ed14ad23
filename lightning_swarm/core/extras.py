"""Packages of the extras that some commands and callbacks need."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from lightning_swarm.core.errors import ConfigError

PACKAGES: Final = {
    "dashboard": ("uvicorn", "starlette", "prometheus_client"),
    "http": ("uvicorn", "starlette", "llguidance", "prometheus_client"),
}
"""Extra -> modules that must be importable, of those that the package itself does not need."""


def require_extra(extra: str, user: str, remedy: str = "Run:") -> None:
    """Raise ConfigError if packages of an extra, which `user` needs, are not installed. Imports none of them."""
    if missing := [name for name in PACKAGES[extra] if find_spec(name) is None]:
        raise ConfigError(f'{user} needs {", ".join(missing)}. {remedy} pip install "lightning-swarm[{extra}]"')
