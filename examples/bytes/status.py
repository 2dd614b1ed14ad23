"""A live line on the swarm: what each stage's peers do. With the plain Trainer there is nothing to tell."""

import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm


class PeerStatus(Protocol):
    """One peer of a stage, as the trainer sees it."""

    @property
    def peer_id(self) -> str:
        """Its identity."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches it has computed."""

    @property
    def samples_per_s(self) -> float:
        """How fast it is estimated to be."""

    @property
    def queued(self) -> int:
        """Microbatches that wait for it."""


class StageStatus(Protocol):
    """One stage."""

    @property
    def index(self) -> int:
        """Counted from 0."""

    @property
    def peers(self) -> Sequence[PeerStatus]:
        """Who holds it."""


class SwarmStatus(Protocol):
    """What `SwarmStrategy.status()` returns."""

    @property
    def step(self) -> int:
        """Steps taken."""

    @property
    def stages(self) -> Sequence[StageStatus]:
        """In order."""


@runtime_checkable
class ReportsStatus(Protocol):
    """A strategy that can be asked."""

    def status(self) -> SwarmStatus:
        """A snapshot; cheap."""


def render(status: SwarmStatus) -> str:
    """One line: for each stage its peers, with speed, queue and microbatches done."""
    return "   ".join(
        f"stage {stage.index}: {', '.join(_peer(peer) for peer in stage.peers) or 'nobody'}" for stage in status.stages
    )


def _peer(peer: PeerStatus) -> str:
    # All identities begin alike; their ends tell them apart.
    return f"{peer.peer_id[-4:]} {peer.samples_per_s:.0f}/s q{peer.queued} n{peer.num_microbatches}"


class StatusLine(L.Callback):
    """Shows the swarm below the progress bar, or, when the output is no terminal, as a plain line now and then.

    Args:
        interval_s: Least time between two updates; ten times as long between plain lines.
    """

    def __init__(self, interval_s: float = 1.0) -> None:
        self.live = sys.stdout.isatty()
        self.interval_s = interval_s if self.live else 10 * interval_s
        self._next_s = 0.0
        self._line: Tqdm | None = None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Update the line when it is due."""
        now_s = time.monotonic()
        if now_s < self._next_s and trainer.global_step < trainer.max_steps:
            return
        self._next_s = now_s + self.interval_s
        text = render(trainer.strategy.status()) if isinstance(trainer.strategy, ReportsStatus) else ""
        if not self.live:
            loss = trainer.callback_metrics.get("train_loss", float("nan"))
            print(
                f"step {trainer.global_step}/{trainer.max_steps}  train_loss {float(loss):.3f}   {text}".rstrip(),
                flush=True,
            )
        elif text:
            if self._line is None:
                self._line = Tqdm(
                    total=0, position=1, bar_format="{desc}", leave=False, dynamic_ncols=True, file=sys.stdout
                )
            self._line.set_description_str(text)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make room: the validation's bar takes the same place on the screen."""
        self._close()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Clear the line."""
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Clear the line, so that the traceback stands alone."""
        self._close()

    def _close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
