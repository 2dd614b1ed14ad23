"""Shows the progress of a joining peer on a terminal, as a bar that the next line replaces."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

from lightning.pytorch.utilities import rank_zero_info
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from lightning_swarm.core.progress import Progress, ProgressLines, Report
from lightning_swarm.peer.process import local_rank

_DOWNLOAD = "{desc} {percentage:3.0f}% |{bar}| {rate_fmt}, {remaining} left"
_WAIT = "{desc} ({elapsed})"


class JoinBar:
    """Shows each `Progress` as a bar, and writes lines above it."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._bar: tqdm[None] | None = None
        self._state = ""

    def __call__(self, news: str | Progress) -> None:
        """Replace the bar by a line, or by the bar of another state."""
        if isinstance(news, str) or news.state != self._state:
            self.close()
        if isinstance(news, str):
            self._write(news)
            return
        if self._bar is None:
            is_download = news.total_bytes > 0
            self._bar = tqdm(
                desc=str(news),
                total=news.total_bytes or None,
                bar_format=_DOWNLOAD if is_download else _WAIT,
                unit="B",
                unit_scale=True,
                leave=False,
                dynamic_ncols=True,
                file=sys.stderr,
            )
            self._state = news.state
        self._bar.set_description_str(str(news), refresh=not news.total_bytes)
        self._bar.update(news.num_bytes - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar, self._state = None, ""


@contextlib.contextmanager
def reporting_join() -> Iterator[Report]:
    """Yield the report of this process's peer: a bar on a terminal, else lines. Only a machine's first peer reports."""
    if local_rank() or not sys.stderr.isatty():
        yield ProgressLines(rank_zero_info)
        return
    package = logging.getLogger("lightning_swarm")
    with (
        logging_redirect_tqdm([package if package.handlers else logging.root]),  # log lines go above the bar
        contextlib.closing(JoinBar(rank_zero_info)) as bar,
    ):
        yield bar
