"""`Dashboard`: shows a run on a page for a browser while it trains."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from typing import Any, Final

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.extras import require_extra
from lightning_swarm.core.rebase import written_once
from lightning_swarm.strategy.framework import CallbackBase

__all__ = ["Dashboard"]

_log = logging.getLogger(__name__)
_HOST: Final = "127.0.0.1"
_END_S: Final = 10.0  # until a page that does not end is killed


@written_once(Callback)
class Dashboard(CallbackBase):
    """Shows the run on a page for a browser while it trains, as ``lightning-swarm dashboard`` does.

    The page's address, such as ``http://127.0.0.1:8080/``, is logged once; it is open to this machine only. A process
    of its own serves the page. It ends with `fit`, also if this process is killed. Only the lead has a page, and a peer
    that becomes the lead opens its own. Without a swarm there is no page.

    Args:
        port: TCP port of the page; 0 for any free one.

    Raises:
        ConfigError: The port is invalid or in use, or the extra ``dashboard`` is not installed. The latter two are
            raised by `fit` before it trains.

    Example:
        >>> trainer = Trainer(strategy=strategy, callbacks=[Dashboard(port=0)])
    """

    def __init__(self, port: int = 8080) -> None:
        super().__init__()
        if type(port) is not int or not 0 <= port < 1 << 16:
            raise ConfigError(
                f"`port` of `Dashboard` must be a whole number from 0 to 65535, got {port!r}. Correct it."
            )
        self.port = port
        self._listening: socket.socket | None = None  # bound before training, and inherited by the page's process
        self._page: subprocess.Popen[bytes] | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or not trainer.is_global_zero or self._page is not None:  # a rollback sets up again
            return
        strategy: Any = trainer.strategy
        if getattr(strategy, "peer", None) is None:
            _log.warning("`Dashboard` shows nothing, because this Trainer has no SwarmStrategy.")
            return
        self.close()
        try:
            self._listening = self._listen()
        except ConfigError as error:
            if not strategy.inherited_stages:  # otherwise the error would end a run that this peer has just taken over
                raise
            _log.warning("The run continues without a page: %s", error)

    def _listen(self) -> socket.socket:
        require_extra("dashboard", "`Dashboard`", "Leave it out, or run:")
        try:
            return socket.create_server((_HOST, self.port))
        except OSError as error:
            raise ConfigError(
                f"`port` of `Dashboard` must be a free port of this machine, got {self.port}: {error}. Use another, "
                "or 0 for any."
            ) from error

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._listening is None:
            return
        strategy: Any = trainer.strategy
        with self._listening as listening:
            self._listening = None
            number, port = listening.fileno(), listening.getsockname()[1]
            command = [sys.executable, "-m", "lightning_swarm", "dashboard", strategy.address]
            command += ["--run-id", strategy.config.run_id, "--fd", str(number), "--parent", str(os.getpid())]
            # In a session of its own, it shows how the run ends after Ctrl-C.
            self._page = subprocess.Popen(
                command, pass_fds=[number], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
            )
        rank_zero_info(f"Dashboard of this run: http://{_HOST}:{port}/")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.close()

    def close(self) -> None:
        """End the page."""
        if self._listening is not None:
            self._listening.close()
        page, self._page, self._listening = self._page, None, None
        if page is not None:
            page.terminate()
            try:
                page.wait(_END_S)
            except subprocess.TimeoutExpired:
                page.kill()
                page.wait()
