"""Starts one process for each further peer of this machine, where the script runs again to serve or train."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_swarm.core import program
from lightning_swarm.core.errors import ConfigError, PeerError, StepError, SwarmError, Unreachable
from lightning_swarm.core.process import collect_as_usual, follow_environment, leaving_on_signals
from lightning_swarm.network.addresses import Address
from lightning_swarm.peer import process
from lightning_swarm.peer.entry import Entry, entry_of
from lightning_swarm.peer.peer import hivemind_peer
from lightning_swarm.strategy.base import MachineLauncher
from lightning_swarm.strategy.checks import check_data_module, check_plain
from lightning_swarm.strategy.framework import IMPORT_TREES, tree_of
from lightning_swarm.strategy.model_setup import computes_alone

if TYPE_CHECKING:
    from lightning_swarm.strategy.strategy import SwarmStrategy

_log = logging.getLogger(__name__)
_CONFIG_ERROR = 78  # exit code of a peer that ended by a `ConfigError`; in C it is EX_CONFIG

_PLAIN: Final = (
    "One device trains alone, without a swarm. To let other peers take part, cut the model between peers by "
    "`num_stages` or `pipeline`, or let every peer with data train by `role='both'` and `target_batch_size`."
)

_OPEN: Final = (
    "`trust='open'`: anyone who reaches this peer's port can join the run, see the data that it computes on, and spoil "
    "the model. Make the port reachable for the run's machines only, by a firewall or a VPN; or leave `trust` out, so "
    "that peers need an invitation."
)


class _HelpedInNotebook(BaseException):
    """The run of another peer, in which this notebook took part, is over; the notebook's process continues."""


@dataclass(frozen=True)
class TrainerCall:
    """A call of a Trainer's function, such as `fit`, which is repeated if its run rolls back."""

    strategy: SwarmStrategy
    trainer: Trainer
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The call's arguments, by name."""
        return inspect.signature(self.function).bind(*self.args, **self.kwargs).arguments

    def resumed(self, path: str | None) -> TrainerCall:
        """Return the same call with this checkpoint as `ckpt_path`; None or empty for no checkpoint."""
        bound = inspect.signature(self.function).bind(*self.args, **self.kwargs)
        bound.arguments["ckpt_path"] = path or None
        return replace(self, args=bound.args, kwargs=bound.kwargs)

    def run(self) -> Any:
        """Call the function, and repeat it from a checkpoint each time that its run rolls back."""
        call = self
        while True:
            result, path = call._run_once()
            if path is None:
                return result
            call = call.resumed(path)

    def run_beside(self) -> str | None:
        """Call the function as a trainer that is not the lead. Returns a checkpoint to lead from if it must lead."""
        call = self
        while True:
            _, path = call._run_once()
            if path is None or self.strategy.is_global_zero:  # the rollback made this process the lead
                return path
            call = call.resumed(path)

    def run_as_lead(self, path: str) -> Any:
        """Call the function as the new lead, from a checkpoint, at a peer that served until now."""
        call = self.resumed(path)
        self.strategy.check(self.trainer, call.arguments)
        return call.run()

    def _run_once(self) -> tuple[Any, str | None]:
        """Call the function once. Returns its result, and the checkpoint to resume from if its run rolls back."""
        try:
            return self.function(*self.args, **self.kwargs), None
        except (PeerError, StepError) as error:
            path = self.strategy.rollback.prepare(self.trainer, error)
            if path is None:
                raise
        if self.strategy.swarm_launcher is not None:
            self.strategy.swarm_launcher.forget_ended()
        return None, path  # outside the handler, so that the loop's old state is freed


class SwarmLauncher(MachineLauncher):
    """Starts and ends this machine's other peers. One class serves both import trees: no Trainer checks its type."""

    launched: ClassVar[bool] = False
    """True if this process has launched a swarm."""

    _first_module: ClassVar[weakref.ref[LightningModule] | None] = None  # see `_check_module`

    def __init__(self, strategy: SwarmStrategy, num_peers: int) -> None:
        super().__init__(num_peers)
        self._strategy = strategy
        self._children: list[subprocess.Popen[bytes]] = []
        self._num_threads: int | None = None  # torch's number of threads before this run shared the cores
        self._is_leaving = False  # this server was told to leave
        self._entry: Entry | None = None  # admission of this process's peer to its run; None if it needs none

    def __reduce__(self) -> tuple[type[SwarmLauncher], tuple[SwarmStrategy, int]]:  # a copy has started no peers
        return SwarmLauncher, (self._strategy, self._num_peers)

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self._num_peers == 1  # a notebook has no script to run again for further peers

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run the Trainer's function in this process's role. Only a lead returns; other peers end the process."""
        if trainer is None:
            raise ConfigError("SwarmStrategy needs a Trainer, got None; call `Trainer.fit`.")
        try:
            return self._launch(trainer, function, *args, **kwargs)
        except _HelpedInNotebook:
            self._strategy.peer = None  # the peer has left the run
            trainer.training, trainer.state.status = False, type(trainer.state.status).FINISHED
            return None

    def _launch(self, trainer: Trainer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function in this process's role: server, no swarm, trainer beside the lead, or lead."""
        SwarmLauncher.launched = True
        collect_as_usual()
        follow_environment()
        self._strategy.config = process.apply_environment(self._strategy.config, self.local_rank)
        call = TrainerCall(self._strategy, trainer, function, args, kwargs)
        classes = tuple(framework.data_module for framework in IMPORT_TREES)
        datamodule = next((value for value in (*args, *kwargs.values()) if isinstance(value, classes)), None)
        if self._strategy.config.only_serves:  # `_end_with` returns only if this server must become the lead
            return call.run_as_lead(self._end_with(lambda: self._serve(call, datamodule)))
        if datamodule is not None:
            check_data_module(trainer, datamodule)
        if self._strategy.is_plain:
            check_plain(trainer)
            if trainer.state.fn == TrainerFn.FITTING:
                rank_zero_info(_PLAIN)
            return function(*args, **kwargs)
        self._check_module(trainer.lightning_module)
        if self._strategy.waits_for_fit(trainer):
            self._num_threads = _share_cores(self._num_peers)  # this machine's other processes evaluate, too
            with self._strategy.evaluating_beside(trainer):
                return function(*args, **kwargs)
        self._strategy.check(trainer, call.arguments)
        if self.local_rank:
            call = self._follow(call, lambda: self._start_peers(trainer))
        elif self._start_peers(trainer):
            if call.arguments.get("ckpt_path") is not None:
                _log.warning("`ckpt_path` is ignored, because the run is under way, with its own weights and steps.")
                call = call.resumed(None)
            call = self._follow(call)
            self._print_how_to_join()  # peers that want to join may only know the dead lead's address
        # No cleanup here, because Lightning tears the strategy down after any error in the call.
        return call.run()

    def _check_module(self, module: LightningModule) -> None:
        """Refuse a module other than the script's first, because children serve at the script's first `fit`."""
        first = SwarmLauncher._first_module
        if first is None:
            SwarmLauncher._first_module = weakref.ref(module)
        elif first() is not module and self._num_peers > 1:
            raise ConfigError(
                "with `devices` above 1, every peer runs this script again, and serves the module of the script's "
                f"first `fit`; this {type(module).__name__} is another module. Train each module in its own run of the "
                "script, or with `devices=1`."
            )

    def _serve(self, call: TrainerCall, datamodule: LightningDataModule | None) -> str | None:
        """Serve until the run is over. If this peer must lead, return the checkpoint to start from."""
        self._start_peers(call.trainer)
        for number, child in enumerate(self._children, start=1):
            threading.Thread(target=self._report_end, args=(number, child), daemon=True).start()
        with leaving_on_signals(self._leave):
            return self._strategy.serve(call.trainer, datamodule, call.arguments)

    def _report_end(self, number: int, child: subprocess.Popen[bytes]) -> None:
        """Wait until another server of this machine has ended and, if it failed, report how many are left."""
        code = child.wait()
        if code == 0 or self._is_leaving or child not in self._children:
            return
        num_left = 1 + sum(peer.returncode is None for peer in self._children)
        _log.warning(
            "%d of %d peers of this machine are left: local peer %d (process %d) ended with exit code %d. Its own "
            "error is above. To restart the missing peers, end this command, and repeat it.",
            *(num_left, self._num_peers, number, child.pid, code),
        )

    def _follow(self, call: TrainerCall, start: Callable[[], object] = lambda: None) -> TrainerCall:
        """Train beside the lead, then end the process. If this peer must lead, return the call to lead with."""

        def follow() -> str | None:
            start()
            self._strategy.follow(call.trainer)
            try:
                return call.run_beside()
            except BaseException as error:  # `_end_with` ends the process before Lightning could handle the error
                tree_of(call.trainer).call._interrupt(call.trainer, error)
                call.trainer._teardown()
                raise

        return call.resumed(self._end_with(follow))

    def _end_with(self, work: Callable[[], str | None]) -> str:
        """Do the work and return its result. If it is None, end the process: only the lead continues after `fit`.

        A notebook's process does not end; there `fit` returns or raises.
        """
        if _IS_INTERACTIVE:
            result = work()
            if result is None:
                raise _HelpedInNotebook
            return result
        code = 0
        try:
            result = work()
            if result is not None:
                return result
        except KeyboardInterrupt:
            code = 130  # a shell's exit code for Ctrl-C
        except SystemExit as leaving:  # raised by a second signal
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except SwarmError as error:
            # Printed in place of a traceback, because no logging configuration may silence it.
            print(f"lightning_swarm: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
            code = _CONFIG_ERROR if isinstance(error, ConfigError) else 1
        except BaseException:  # noqa: BLE001 - the script must not continue as if this process were the trainer
            traceback.print_exc()
            code = 1
        self._end_children_in_order(code)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        # `sys.exit` would look like a failed fit to Lightning, which would notify callbacks and loggers.
        os._exit(code)

    def _leave(self, reason: str) -> None:
        """Make this server and this machine's other servers leave the run."""
        _log.warning("%s: leaving the run. A second signal ends this process at once.", reason)
        self.let_children_leave()
        if self._strategy.peer is not None:
            self._strategy.peer.leave()

    def let_children_leave(self) -> None:
        """Make this machine's other servers leave a run that continues."""
        self._is_leaving = True
        for child in self._children:
            child.terminate()

    def _handle_notice(self, reason: str) -> None:
        """Leave the run after a cloud's preemption notice; a trainer ends its loop as on SIGTERM."""
        if self._strategy.config.only_serves:
            self._leave(reason)
            return
        _log.warning("%s. Training in this process ends.", reason)
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # Lightning's handler ends the loop in order
            os.kill(os.getpid(), signal.SIGTERM)

    def _end_children_in_order(self, code: int) -> None:
        """Shut the children down when this process ends with an exit code; codes from 128 stand for signals."""
        limits = self._strategy.config.limits
        # Servers that leave may wait for the record that releases them.
        timeout = limits.leave_timeout + (limits.drain_timeout if self._is_leaving else 0.0)
        self.end_children(timeout, dismissed=code == 0 or (self._is_leaving and code < 128))

    @override
    def kill(self, signum: int) -> None:
        """Ignore signals that Lightning passes on, because `Strategy.teardown` shuts the children down."""

    @property
    def processes(self) -> list[int]:
        """Return the process ids of the other peers that this process started."""
        return [child.pid for child in self._children]

    def check_children(self) -> None:
        """Raise if a child has ended."""
        for number, child in enumerate(self._children, start=1):
            if child.poll() is not None:
                error_class = ConfigError if child.returncode == _CONFIG_ERROR else Unreachable
                raise error_class(
                    f"local peer {number} (process {child.pid}) ended with exit code {child.returncode} before the "
                    "run began. Its own error is above. Peers run this script again: it must reach `fit` without "
                    "input, and must not depend on files that an earlier run left behind."
                )

    @property
    def num_ended(self) -> int:
        """Return the number of children that have ended."""
        return sum(child.poll() is not None for child in self._children)

    def forget_ended(self) -> None:
        """Forget the children that have ended."""
        self._children = [child for child in self._children if child.poll() is None]

    def end_children(self, timeout: float, *, dismissed: bool) -> None:
        """End the children. If `dismissed`, they have `timeout` seconds to end by themselves; otherwise kill them."""
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
            self._num_threads = None
        deadline = time.monotonic() + (timeout if dismissed else 0.0)
        children, self._children = self._children, []
        for child in children:
            try:
                child.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                if dismissed:
                    _log.warning("Local peer %d did not end in %g s and was killed.", child.pid, timeout)
                child.kill()
                child.wait()
            assert child.stdin is not None
            with contextlib.suppress(OSError):
                child.stdin.close()

    def _start_peers(self, trainer: Trainer) -> bool:
        """Start this process's peer and, in the first process, children; return whether this trainer joined a run."""
        is_first, joins = self.local_rank == 0, False
        serves = self._strategy.config.only_serves
        starts_children = is_first and self._num_peers > 1 and (serves or not computes_alone(self._strategy, trainer))
        command = process.child_command() if starts_children else []
        if self._num_peers > 1 and (starts_children or not is_first):
            self._num_threads = _share_cores(self._num_peers)
        self._entry = self._own_entry()
        if self._strategy.config.initial_peers:
            places = " and ".join(str(address.host_port) for address in self._strategy.config.initial_peers)
            rank_zero_info(f"Connecting to {places}.")
        peer = self._strategy.peer = hivemind_peer(self._strategy.config, self._entry)
        if is_first:
            peer.check_run_id()
            announced = peer.runtime.run(peer.transport.addresses())
            addresses = process.addresses_for_children(self._strategy.config, announced)
            joins = self._strategy.join_running(trainer)
            # A run that only evaluates admits no further peers.
            if serves or trainer.state.fn == TrainerFn.FITTING:
                self._print_how_to_join()
            if starts_children:
                self._start_children(command, addresses)
        if self._strategy.config.preemption is not None:
            peer.watch_for_notice(self._strategy.config.preemption, self._handle_notice)
        return joins

    def _print_how_to_join(self) -> None:
        """Print how other machines join the run. Makes no invitation."""
        peer = self._strategy.own_peer
        addresses = [Address.parse(text) for text in peer.runtime.run(peer.transport.addresses())]
        config = self._strategy.config
        rank_zero_info(process.how_to_join(config, addresses, self._entry, num_peers=self._num_peers))

    def _own_entry(self) -> Entry | None:
        """Return this peer's admission to its run, which it does not join yet; None if the run admits any peer."""
        config = self._strategy.config
        if config.trust == "open" and not config.is_local and self.local_rank == 0:
            _log.warning(_OPEN)
        entry = entry_of(config, process.owners_folder, now_s=time.time())
        if entry is not None and self.local_rank == 0 and self._num_peers > 1:
            entry.check_children(self._num_peers - 1)
        return entry

    def _start_children(self, command: Sequence[str], addresses: Sequence[str]) -> None:
        self.launch_id = secrets.token_hex(8)
        trains, num_children, config = self._strategy.num_trainers > 1, self._num_peers - 1, self._strategy.config
        invitation = None
        if self._entry is not None:
            invitation = self._entry.invitation_for_children(num_children, train=trains, now_s=time.time())
        folder = program.start_folder()  # the script's relative paths must work in the children, too
        with process.handed_over(invitation) as (variables, descriptors):
            for rank in range(1, self._num_peers):
                environment = process.child_environment(rank, addresses, config, launch=self.launch_id, trains=trains)
                self._children.append(
                    # Children end when the pipe to their parent closes, however the parent died. They have their own
                    # session, so they do not get the terminal's Ctrl-C: the trainer shuts its peers down.
                    subprocess.Popen(
                        command,
                        env={**environment, **variables},
                        cwd=folder if folder.is_dir() else None,
                        stdin=subprocess.PIPE,
                        start_new_session=True,
                        pass_fds=descriptors,
                    )
                )


def _share_cores(num_peers: int) -> int | None:
    """Share the cores among this machine's peers. Returns torch's former number of threads; None if the user set it."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_peers))
    return before
