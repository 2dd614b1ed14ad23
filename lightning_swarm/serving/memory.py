"""Measures the memory that a server may take, and divides it between weights and texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.readable import size_text

_RESERVED: Final = 0.2  # share of the free memory that is left for computation and for other programs
_GROUPS: Final = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device, *, groups: Path = _GROUPS) -> int:
    """Return the free bytes of a GPU, or of this machine's memory within the limits of its control groups."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    # psutil ignores control groups.
    return max(0, min([int(psutil.virtual_memory().available), *_left_in_groups(groups)]))


def _left_in_groups(root: Path, groups: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Yield the bytes that each limited control group of this process may still use.

    Source: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst, whose files have different names.
    """
    group_by_controller = dict[str, str]()
    with suppress(OSError):  # lines like "0::/group" in version 2, and "4:memory:/group" in version 1
        fields = [line.split(":", 2) for line in groups.read_text().splitlines()]
        group_by_controller = {name: group for _, names, group in fields for name in names.split(",")}
    v1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    for top, group, names in (
        (root, group_by_controller.get("", ""), ("memory.max", "memory.current", "inactive_file")),
        (root / "memory", group_by_controller.get("memory", ""), v1),
    ):
        # A container may not see this folder. Then its own limit is at the top.
        folder = top / group.strip("/")
        for ancestor in (folder, *folder.parents):
            if ancestor.is_relative_to(top):
                yield from _left_in(ancestor, *names)


def _left_in(group: Path, limit: str, used: str, cache: str) -> Iterator[int]:
    with suppress(OSError, ValueError, KeyError):  # a group without a limit has "max", or in version 1 about 2^63
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        yield int((group / limit).read_text()) - int((group / used).read_text()) + int(stat[cache])


def shares(memory: int | None, texts: int | None, device: torch.device, say: Callable[[str], None]) -> tuple[int, int]:
    """Return the bytes for weights and the bytes for texts.

    Args:
        memory: Bytes for both; None: four fifths of the device's free memory.
        texts: Bytes for texts; None: a quarter.
        device: The device that computes.
        say: Prints a sentence about the measured memory.

    Raises:
        ConfigError: Nothing is left for weights.
    """
    free = free_bytes(device) if memory is None else 0
    total = int((1 - _RESERVED) * free) if memory is None else memory
    for_texts = total // 4 if texts is None else texts
    if not 0 < for_texts < total:
        raise ConfigError(
            f"`--memory` is for weights and texts, got {size_text(total)} with {size_text(for_texts)} for texts. "
            "Lower `--texts`, or raise `--memory`."
        )
    if memory is None:
        say(
            f"Taking {size_text(total)} of memory, of which {size_text(for_texts)} for texts: {size_text(free)} are "
            f"free on {device}, and a fifth is left for computation and other programs. Change this by `--memory`."
        )
    return total - for_texts, for_texts


def check_fits(num_bytes: int, device: torch.device) -> None:
    """Refuse weights that are larger than the free memory of their device, before they are loaded."""
    if (free := free_bytes(device)) < num_bytes:
        raise ConfigError(
            f"weights must fit into the free memory of {device}, got {size_text(num_bytes)} of weights and "
            f"{size_text(free)} of free memory. Lower `--memory`, or leave it out to use the free memory."
        )
