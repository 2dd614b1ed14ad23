"""What only a trainer beside the lead does: come to a run, hear that it goes back, and go."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import torch

from lightning_swarm.client import coordinator_client
from lightning_swarm.client.session import Session
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import ConfigError, DeadlineExceeded, ProtocolError, RunOver, SwarmError, Unreachable
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.core.tasks import first_of, gather
from lightning_swarm.network import Directory, PeerId, Transport
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.peer import discovery, failover
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.server_host import ServerHost
from lightning_swarm.peer.trainer_role import TrainerRole
from lightning_swarm.protocol.messages.membership import ClaimReply
from lightning_swarm.protocol.messages.run import RunView, ranges_of
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, decode, encode
from lightning_swarm.protocol.methods import VIEW
from lightning_swarm.protocol.run_state import RunState, check_open
from lightning_swarm.server.stage_builder import PeerModel

CLAIM: Final = "run.claim"
_POLL_S: Final = 0.2


# Exactly one program begins a run. Each one that would begin it announces it, then asks all others that did. It gives
# way to one that begins already, or has the lower id; of any two, at least one has heard of the other. A program that
# gave way waits for the run, and claims it anew when nothing comes of it.
async def find_run(directory: Directory, transport: Transport, config: SwarmConfig) -> RunView | None:
    """The run that is under way, as its coordinator shows it."""
    timeout = config.limits.leave_timeout

    async def look(peer: PeerId) -> RunView | None:
        try:
            view = decode(await transport.call(peer, VIEW, b"", timeout=timeout), RunView)
        except SwarmError:  # what is left of an earlier one
            return None
        return view if view.manifest.run_id == config.run_id else None

    found = await gather(map(look, await discovery.find_runs(directory, transport, config.run_id)))
    views = [view for view in found if view is not None]
    return max(views, key=lambda view: (view.manifest.generation, view.term, view.version), default=None)


def check(view: RunView, config: SwarmConfig) -> None:
    """Refuse to train in a run that is another one than this program's, as far as its settings say.

    Raises:
        ConfigError: Names the first one that differs.
    """
    manifest = view.manifest
    check_open(manifest)
    for name, mine, theirs in (
        ("protocol_version", PROTOCOL_VERSION, manifest.protocol_version),
        ("target_batch_size", config.target_batch_size, manifest.target_batch_size),
    ):
        if mine != theirs:
            raise ConfigError(
                f"who trains in a run has its settings; `{name}` is {mine} here and {theirs} in run "
                f"{manifest.run_id!r}. Start this program with the run's, or another run with another `run_id`."
            )


class Claim:
    """One program's, on the run that it would begin.

    Args:
        transport: Its network.
        directory: Where others find it.
        config: The user's settings.
    """

    def __init__(self, transport: Transport, directory: Directory, config: SwarmConfig) -> None:
        self._transport = transport
        self._directory = directory
        self._config = config
        self._rivals: set[PeerId] = set()
        self._begins = self._gave_way = False
        transport.handle_call(CLAIM, self._handle_claim)

    async def settle(self) -> RunView | None:
        """The run that is under way, perhaps after a while. None: this program begins it.

        Raises:
            DeadlineExceeded: Another one was to begin it, and did not.
        """
        view = await find_run(self._directory, self._transport, self._config)
        if view is not None:
            return view
        timeout = self._config.limits.start_timeout
        deadline_s = now_s() + timeout
        await discovery.claim(self._directory, self._transport, self._config.run_id, timeout=timeout)
        while not await self._wins():
            await asyncio.sleep(_POLL_S)
            view = await find_run(self._directory, self._transport, self._config)
            if view is not None:
                return view
            if now_s() >= deadline_s:
                raise DeadlineExceeded(
                    f"another program was to begin run {self._config.run_id!r} and did not within {timeout:g} s: one "
                    f"of {sorted(self._rivals)}. Look for its error, or raise `Limits.start_timeout`."
                )
        return None

    async def _wins(self) -> bool:
        self._gave_way = False
        self._rivals |= set(await discovery.claimed(self._directory, self._transport, self._config.run_id))
        self._rivals.discard(self._transport.peer_id)
        answers = await gather(map(self._gives_way, sorted(self._rivals)))
        # Nothing is awaited from here on: whoever asks next finds this decided.
        self._begins = all(answers) and not self._gave_way
        return self._begins

    async def _gives_way(self, rival: PeerId) -> bool:
        try:
            timeout = self._config.limits.leave_timeout
            return decode(await self._transport.call(rival, CLAIM, b"", timeout=timeout), ClaimReply).gives_way
        except SwarmError:  # it is gone
            return True

    async def _handle_claim(self, caller: PeerId, body: bytes) -> bytes:
        if body:
            raise ProtocolError(f"{CLAIM} takes no arguments, got {len(body)} bytes")
        gives_way = not self._begins and caller < self._transport.peer_id
        self._gave_way |= gives_way
        return encode(ClaimReply(gives_way=gives_way))


_LOOK_S: Final = 1.0


class Follower:
    """One peer, in runs that another one leads.

    Args:
        runtime: The way to its loop.
        transport: Its network.
        directory: Where peers find each other.
        config: The user's settings.
        host: Of its server.
        training: Opens its sessions.
    """

    def __init__(
        self,
        runtime: Runtime,
        transport: Transport,
        directory: Directory,
        config: SwarmConfig,
        host: ServerHost,
        training: TrainerRole,
    ) -> None:
        self._runtime = runtime
        self._transport = transport
        self._directory = directory
        self._config = config
        self._host = host
        self._training = training
        self._beside: failover.StandbyLead | None = None  # another trainer leads

    # ------------------------------------------------------------------ a run under way

    def find_run(self) -> RunView | None:
        """The run to train in; None: this peer begins it. Others may want to begin it, too: exactly one does.

        Raises:
            ConfigError: The run's settings are others than this peer's.
            DeadlineExceeded: Another one was to begin it, and did not.
        """
        view = self._runtime.run(Claim(self._transport, self._directory, self._config).settle())
        if view is not None:
            check(view, self._config)
        return view

    def find_run_again(self) -> RunView | None:
        """The run that has gone back without this peer, which trains in it; None: nobody shows it."""
        return self._runtime.run(find_run(self._directory, self._transport, self._config))

    def train_in(
        self, seen: RunView, model: PeerModel, server: PeerModel | None, device: torch.device, *, inherits: bool
    ) -> tuple[Session, int]:
        """Open a trainer's session in a run under way, from one of its next steps on.

        Args:
            seen: The run.
            model: This peer's copy.
            server: What its server computes with, which joins a stage meanwhile; None: it holds none.
            device: Where the trainer's tensors live.
            inherits: It leads the run when its lead is gone.

        Returns:
            The session, and the epoch of the lead's loop.

        Raises:
            ConfigError: This peer's model is not the run's, or the run takes no trainers.
            RunOver: It ended before it let this one in.
        """
        model.check(seen.manifest)
        if server is not None:
            self._runtime.run(self._host.serve(server, trains=True, inherits=inherits))
        else:
            self._runtime.run(self._host.start(model))  # unannounced: it hears of the run's end, and holds no stage
        admission, limits = self._host.admission, self._config.limits
        run = admission.trains_in = RunState.seen(seen, seen.version)
        beside = self._follow()
        beside.come()
        runtime = self._host.until_over(self._runtime, admission.released, grace_s=limits.leave_timeout)
        if server is not None:
            self._runtime.run(self._host.keep_joined(run))
        view, epoch = runtime.run(
            coordinator_client.enter(
                self._transport,
                run,
                coordinator_client.Patience(
                    answer_s=limits.call_timeout, successor_s=limits.stage_timeout, alone_s=limits.lead_timeout
                ),
            )
        )
        run = admission.trains_in = RunState.seen(view, view.version)
        beside.enter_run(run)
        return self._open(run, model, device, runtime), epoch

    def leave_in_order(self) -> None:
        """Have the run let this peer's server go, if it is in one; for as long as that may take."""
        self._runtime.post(self._host.leave)
        with contextlib.suppress(RunOver, SwarmError):
            self._runtime.run(self._host.until_let_go())

    # ------------------------------------------------------------------ a run that begins

    def await_prepared(self, launch_id: str) -> None:
        """Wait until the starter, of the same launch, has prepared the data."""
        timeout = self._config.limits.lead_timeout
        self._runtime.run(discovery.await_prepared(self._directory, self._config.run_id, launch_id, timeout=timeout))

    def join_run(self, model: PeerModel, server: PeerModel, device: torch.device) -> Session:
        """Serve, and open a trainer's session in the run as soon as the starter has begun it.

        Args:
            model: This peer's copy.
            server: What its server computes with.
            device: Where the trainer's tensors live.

        Raises:
            DeadlineExceeded: The starter did not begin.
            RunOver: It ended before it began.
        """
        self._runtime.run(self._host.serve(server, trains=True, inherits=self._host.could_lead))
        limits = self._config.limits
        beside, back = self._follow(), self._host.admission.released
        runtime = self._host.until_over(self._runtime, back, grace_s=limits.leave_timeout)
        run = runtime.run(self._begun(beside, timeout=limits.lead_timeout))
        self._runtime.run(self._host.keep_joined(run))
        return self._open(run, model, device, runtime)

    async def _begun(self, beside: failover.StandbyLead, *, timeout: float) -> RunState:
        """The run, once it has begun."""
        admission, beside.waits = self._host.admission, True
        try:
            async with asyncio.timeout(timeout):
                await first_of(admission.ready.wait(), self._lead_is_gone())
        except TimeoutError:
            raise DeadlineExceeded(
                f"the run's starter did not begin within {timeout:g} s. Look for its error, or raise "
                "`Limits.lead_timeout`."
            ) from None
        finally:
            beside.waits = False
        run = admission.trains_in = RunState(admission.run.manifest)
        beside.enter_run(run)
        return run

    async def _lead_is_gone(self) -> None:
        """Raises when that of a run which goes back does not answer any more: nobody begins the next one."""
        limits, lead = self._config.limits, self._host.admission.lead
        if lead is None:  # it is the first run, whose starter is not known as yet
            await asyncio.Event().wait()
            return
        heard_s = now_s()
        while now_s() - heard_s < limits.revive_timeout:
            await asyncio.sleep(_LOOK_S)
            if await alive_among(self._transport, [lead], timeout=limits.silence_timeout):
                heard_s = now_s()
        raise Unreachable(
            f"{lead}, which was to go on with the run, has not answered for {limits.revive_timeout:g} s. Start the "
            "run again with `ckpt_path`."
        )

    def wait_until_dismissed(self) -> None:
        """Serve until the run is over.

        Raises:
            StepError: It broke off.
            WentBack: It goes on from an earlier step.
        """
        runtime = self._host.until_over(self._runtime, self._host.admission.released)
        with contextlib.suppress(RunOver):
            runtime.run(self._host.until_dismissed())

    def _follow(self) -> failover.StandbyLead:
        if self._beside is None:
            self._beside = failover.StandbyLead(self._transport, self._host.admission, limits=self._config.limits)
        return self._beside

    def _open(self, run: RunState, model: PeerModel, device: torch.device, runtime: Runtime) -> Session:
        stages = model.cut(ranges_of(run.manifest.stages))
        around = self._host.around(stages[-1], run, self._runtime)
        return self._training.open(run, stages, model.blocks, around, device=device, runtime=runtime)

    # ------------------------------------------------------------------ a run that goes back

    @property
    def follows(self) -> bool:
        """Whether this peer trains, or is about to, where another one leads."""
        return self._beside is not None

    def lead_instead(self) -> None:
        """This peer leads from here on."""
        self._host.admission.trains_in = self._beside = None

    def told_to_go_back(self) -> int | None:
        """After an error: the step from which the run goes on. None: as it is, or not at all."""
        return None if self._beside is None else self._runtime.run(self._beside.told_to_go_back())

    @property
    def is_told(self) -> bool:
        """Whether this peer's server, which is in the run, was told that it goes back."""
        return self._host.server is not None and self._host.admission.released.is_set()

    @property
    def is_led_anew(self) -> bool:
        """Once the run was released: whether another peer leads it than this one knew."""
        return self._beside is not None and self._beside.is_led_anew

    def tell_loop(self, could_go_on: failover.CouldGoOn) -> None:
        """What says at which versions this trainer's loop could go on. See `survivors.Beside`."""
        assert self._beside is not None
        self._beside.could_go_on = could_go_on
