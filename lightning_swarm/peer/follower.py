"""A trainer beside the lead: finds or joins a run, follows its rollbacks, and leaves."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from lightning_swarm.client import coordinator_client
from lightning_swarm.client.run_session import Session
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import ConfigError, DeadlineExceeded, RunOver, SwarmError, Unreachable
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.core.tasks import first_of, gather
from lightning_swarm.network import PeerId
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.peer import failover
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.discovery import RunDirectory
from lightning_swarm.peer.server_host import ServerHost
from lightning_swarm.peer.trainer_role import TrainerRole
from lightning_swarm.protocol.bans import apply_received_ban
from lightning_swarm.protocol.messages.membership import ClaimReply
from lightning_swarm.protocol.messages.run import RunView, ranges_of
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION
from lightning_swarm.protocol.queries import ask_view
from lightning_swarm.protocol.rpc import CLAIM
from lightning_swarm.protocol.run_state import RunState, check_open
from lightning_swarm.protocol.settings import SET_BY_EACH_TRAINER
from lightning_swarm.server.stage_builder import PeerModel

_POLL_S: Final = 0.2
_LOOK_S: Final = 1.0


async def find_run(directory: RunDirectory, config: SwarmConfig) -> RunView | None:
    """Return the view of the run under way, from its coordinator; None if there is no run."""
    # Some of the announced runs may be over: their announcements outlive them.
    peers, timeout = await directory.find_runs(), config.limits.leave_timeout
    answers = await gather(ask_view(directory.transport, peer, timeout=timeout) for peer in peers)
    views = [view for view in answers if view is not None and view.manifest.run_id == config.run_id]
    return max(views, key=lambda view: (view.manifest.generation, view.term, view.version), default=None)


def check_same_settings(view: RunView, config: SwarmConfig) -> None:
    """Raise a ConfigError if this program's settings differ from the run's in a way that a trainer must not."""
    manifest = view.manifest
    check_open(manifest)
    if manifest.is_whole and config.role != "both":
        raise ConfigError(
            f"run {manifest.run_id!r} is not cut, so each trainer holds the whole model: `role` must be 'both', "
            f"got {config.role!r}. Set it, or start the run with `pipeline=...`."
        )
    for name, own, of_run in (
        ("protocol_version", PROTOCOL_VERSION, manifest.protocol_version),
        *((name, getattr(config.settings, name), getattr(manifest.settings, name)) for name in SET_BY_EACH_TRAINER),
    ):
        if own != of_run:
            raise ConfigError(
                f"a trainer must have the run's settings; `{name}` is {own} here and {of_run} in run "
                f"{manifest.run_id!r}. Use the run's value, or choose another `run_id` to start another run."
            )


class Claim:
    """A program's claim to begin a run; of all programs that announce a claim, exactly one begins the run.

    A program announces its claim, then asks all others to give way. Each gives way to a lower peer id unless it has won
    already. A program wins once all others gave way and it gave way to none of them meanwhile.
    """

    def __init__(self, directory: RunDirectory, config: SwarmConfig) -> None:
        self._directory = directory
        self._transport = directory.transport
        self._config = config
        self._rivals: set[PeerId] = set()  # other programs that announced a claim
        self._begins = False  # all rivals gave way
        self._gave_way = False  # this program gave way to a rival since it last asked the rivals
        CLAIM.serve(self._transport, self._handle_claim)

    async def settle(self) -> RunView | None:
        """Wait for the run of another program; None: this program begins it. Raises `DeadlineExceeded` if none does."""
        view = await find_run(self._directory, self._config)
        if view is not None:
            return view
        timeout = self._config.limits.start_timeout
        deadline_s = now_s() + timeout
        # Each program announces itself before it asks the others, so of any two, at least one knows the other.
        await self._directory.announce_starter(timeout=timeout)
        # A program that gave way waits for the run, and repeats its claim until the run appears.
        while not await self._wins():
            await asyncio.sleep(_POLL_S)
            view = await find_run(self._directory, self._config)
            if view is not None:
                return view
            if now_s() >= deadline_s:
                is_invited = self._transport.permit_of(self._transport.peer_id) is not None
                ban = " The owner can ban a peer that never begins: `lightning-swarm ban`." if is_invited else ""
                raise DeadlineExceeded(
                    f"another program claimed run {self._config.run_id!r} and did not begin it within {timeout:g} s: "
                    f"one of {sorted(self._rivals)}. Look for its error, or raise `Limits.start_timeout`.{ban}"
                )
        return None

    async def _wins(self) -> bool:
        """Ask all rivals to give way; return whether all of them did, and this program gave way to none meanwhile."""
        self._gave_way = False
        self._rivals |= set(await self._directory.find_starters())
        self._rivals.discard(self._transport.peer_id)
        answers = await gather(map(self._gives_way, sorted(self._rivals)))
        # Nothing is awaited from here on, so the next rival's request already gets the decision.
        self._begins = all(answers) and not self._gave_way
        return self._begins

    async def _gives_way(self, rival: PeerId) -> bool:
        try:
            timeout = self._config.limits.leave_timeout
            return (await CLAIM.ask(self._transport, rival, None, timeout=timeout)).gives_way
        except SwarmError:  # the rival is gone
            return True

    async def _handle_claim(self, caller: PeerId, _: None) -> ClaimReply:
        gives_way = not self._begins and caller < self._transport.peer_id  # the lower id wins
        self._gave_way |= gives_way
        return ClaimReply(gives_way=gives_way)


@dataclass(eq=False)
class Follower:
    """A peer's part in runs that another peer leads."""

    _runtime: Runtime
    _directory: RunDirectory
    _config: SwarmConfig
    _host: ServerHost
    _training: TrainerRole
    _rollbacks: failover.RollbackFollower | None = None  # None: this peer follows no other trainer

    # ------------------------------------------------------------------ a run under way

    def settle_run(self) -> RunView | None:
        """Return the run to train in, after checking its settings; None: this peer begins it."""
        view = self._runtime.run(Claim(self._directory, self._config).settle())
        if view is not None:
            check_same_settings(view, self._config)
        return view

    def find_run_again(self) -> RunView | None:
        """Return the run that this peer trained in, and that rolled back without it; None if no peer shows it."""
        return self._runtime.run(find_run(self._directory, self._config))

    def train_in(
        self, seen: RunView, model: PeerModel, device: torch.device, *, serves: bool, may_take_over: bool
    ) -> tuple[Session, int]:
        """Open a session in a run under way, from one of its next steps on; return the session and the lead's epoch."""
        model.check(seen.manifest)
        if serves:  # this peer's server joins a stage at the same time
            self._runtime.run(self._host.announce(model.twin(), trains=True, may_take_over=may_take_over))
        else:
            # Unannounced: the server holds no stage, but is notified of the run's end.
            self._runtime.run(self._host.start(model.twin()))
        admission, limits = self._host.admission, self._config.limits
        run = admission.membership.trains_in = RunState.from_view(seen, seen.version)
        rollbacks = self._follow_rollbacks()
        rollbacks.leave_run()  # forget the run generation that this peer was in before
        # For calls that must end when the run is over or rolls back; `self._runtime` is for the peer's own server.
        runtime_until_over = self._host.runtime_until_over(
            self._runtime, admission.released, grace_s=limits.leave_timeout
        )
        if serves:
            self._runtime.run(self._host.keep_joined(run))
            if seen.manifest.is_whole:  # the trainer computes with its own server's model
                runtime_until_over.run(self._host.until_member(0))
        timeouts = coordinator_client.CoordinatorTimeouts(
            answer_s=limits.call_timeout, successor_s=limits.stage_timeout, alone_s=limits.lead_timeout
        )
        view, epoch = runtime_until_over.run(coordinator_client.enter(self._directory.transport, run, timeouts))
        run = admission.membership.trains_in = RunState.from_view(view, view.version)
        rollbacks.enter_run(run)
        return self._open(run, model, device, runtime_until_over), epoch

    def leave_in_order(self) -> None:
        """Ask the run to let this peer's server leave, if it is in one, and wait up to `Limits.drain_timeout`."""
        self._runtime.post(self._host.leave)
        with contextlib.suppress(RunOver, SwarmError):
            self._runtime.run(self._host.until_server_left())

    # ------------------------------------------------------------------ a run that begins

    def await_event(self, launch_id: str, event: str) -> bytes:
        """Wait until the starter of the same launch announces an event, such as that the data is prepared."""
        # Any peer may publish anything, so only the starter's announcement counts. The processes that it starts have it
        # as their first initial peer.
        peers, timeout = self._config.initial_peers, self._config.limits.lead_timeout
        starter = peers[0].peer_id if peers else None
        return self._runtime.run(self._directory.await_event(launch_id, event, timeout=timeout, starter=starter))

    def join_run(self, model: PeerModel, device: torch.device) -> Session:
        """Serve, and open a session in the run as soon as the starter has begun it."""
        self._runtime.run(self._host.announce(model.twin(), trains=True, may_take_over=self._host.may_take_over))
        limits = self._config.limits
        rollbacks, released = self._follow_rollbacks(), self._host.admission.released
        runtime = self._host.runtime_until_over(self._runtime, released, grace_s=limits.leave_timeout)
        run = runtime.run(self._await_begin(rollbacks, timeout=limits.lead_timeout))
        self._runtime.run(self._host.keep_joined(run))
        return self._open(run, model, device, runtime)

    async def _await_begin(self, rollbacks: failover.RollbackFollower, *, timeout: float) -> RunState:
        """Wait until the lead has begun the run with this peer's server, and return the run's state at its start."""
        admission, rollbacks.waits = self._host.admission, True
        try:
            async with asyncio.timeout(timeout):
                await first_of(admission.ready.wait(), self._raise_when_lead_gone())
        except TimeoutError:
            raise DeadlineExceeded(
                f"the run's starter did not begin within {timeout:g} s. Look for its error, or raise "
                "`Limits.lead_timeout`."
            ) from None
        finally:
            rollbacks.waits = False
        run = admission.membership.trains_in = RunState(admission.membership.run.manifest)
        rollbacks.enter_run(run)
        return run

    async def _raise_when_lead_gone(self) -> None:
        """Raise `Unreachable` if the lead died during a rollback, because no peer would start the next generation."""
        limits, lead = self._config.limits, self._host.admission.membership.lead
        if lead is None:  # the first generation: the starter is not known yet, so wait until cancelled
            await asyncio.Event().wait()
            return
        answered_s = now_s()
        while now_s() - answered_s < limits.revive_timeout:
            await asyncio.sleep(_LOOK_S)
            if await alive_among(self._directory.transport, [lead], timeout=limits.silence_timeout):
                answered_s = now_s()
        raise Unreachable(
            f"{lead}, which was to continue the run, has not answered for {limits.revive_timeout:g} s. Start the run "
            "again with `ckpt_path`."
        )

    def wait_until_dismissed(self) -> None:
        """Serve until the run is over; raises `StepError` if it broke off, and `WentBack` if it rolls back."""
        runtime = self._host.runtime_until_over(self._runtime, self._host.admission.released)
        with contextlib.suppress(RunOver):
            runtime.run(self._host.until_dismissed())

    def _follow_rollbacks(self) -> failover.RollbackFollower:
        if self._rollbacks is None:
            limits = self._config.limits
            self._rollbacks = failover.RollbackFollower(self._directory.transport, self._host.admission, limits=limits)
        return self._rollbacks

    def _open(self, run: RunState, model: PeerModel, device: torch.device, runtime: Runtime) -> Session:
        run.apply_bans_by(partial(apply_received_ban, self._directory.transport))
        stages = model.build_stages(ranges_of(run.manifest.stages))
        local_layers = self._host.local_layers(stages[-1], run, self._runtime, runtime)
        return self._training.open(run, stages, local_layers, device=device, runtime=runtime)

    # ------------------------------------------------------------------ a run that rolls back

    @property
    def follows(self) -> bool:
        """True if this peer trains, or is about to, in a run that another peer leads."""
        return self._rollbacks is not None

    def stop_following(self) -> None:
        """Stop following, because this peer is about to lead."""
        self._host.admission.membership.trains_in = self._rollbacks = None

    def rollback_step(self) -> int | None:
        """Return the step to which the run rolls back after an error; None if it does not roll back."""
        return None if self._rollbacks is None else self._runtime.run(self._rollbacks.rollback_step())

    @property
    def is_rolling_back(self) -> bool:
        """True if this peer's server, which is in the run, was notified of a rollback."""
        return self._host.server is not None and self._host.admission.released.is_set()

    @property
    def has_new_lead(self) -> bool:
        """True if the peer that released the run is not its former lead."""
        return self._rollbacks is not None and self._rollbacks.has_new_lead

    def set_can_resume(self, can_resume: failover.CanResume) -> None:
        """Set the function that decides whether this trainer's loop could continue at a version."""
        assert self._rollbacks is not None
        self._rollbacks.can_resume = can_resume
