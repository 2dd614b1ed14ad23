"""Reads one trainer's batches of the data that all trainers of its run share, in an order common to all trainers."""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import accumulate, islice
from typing import Any, Final

import torch
from lightning.pytorch import Trainer
from msgspec.structs import replace as replace_fields
from torch.utils._pytree import tree_unflatten
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import TypeIs

from lightning_swarm.client.run_session import Session
from lightning_swarm.core.errors import ConfigError, RunOver
from lightning_swarm.core.override import Override
from lightning_swarm.protocol.messages.run import MAX_METRIC_BYTES, MAX_PLAN_METRICS, BatchNumber, EpochPlan
from lightning_swarm.protocol.messages.wire import MAX_TEXT, decode, encode
from lightning_swarm.protocol.run_state import next_in_lane
from lightning_swarm.strategy.data.listing import EpochListing, subset_digest
from lightning_swarm.strategy.data.loader import (
    LaneSampler,
    SharedLoader,
    divides_itself,
    drawing_from,
    own_generators,
    reading_data,
    take_random_numbers,
)
from lightning_swarm.strategy.framework import tree_of
from lightning_swarm.strategy.skip_divergence import skipped_batches

_log = logging.getLogger(__name__)


# This is at module level, because a copy or a pickle of the user's module refers to it.
def _read_by(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with reading_data():
        return hook(*args, **kwargs)


STATE: Final = "swarm_data"  # key of the position in the data, in a fit loop's state


class SharedData:
    """Plans and reads one trainer's data in one run. Does nothing if the trainers share no loader."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._session: Session | None = None
        self._overrides: Sequence[Override] = ()
        self._hooks: Sequence[Override] = ()
        self._origin: DataLoader[Any]  # the user's loader, once it is shared
        self._loader: SharedLoader | None = None  # the loader in its place
        self._plans: dict[int, EpochPlan] = {}  # epoch -> plan
        self._listings: dict[int, EpochListing] = {}  # epoch -> batches of its plan
        self._start: BatchNumber | None = None  # first batch of this generation of the run
        self._received: dict[int, EpochPlan | None] = {}  # epoch -> plan from the lead whose batches are not drawn yet
        self._restored: dict[int, EpochPlan] = {}  # epoch -> plan in the checkpoint that was loaded
        self._restored_position: BatchNumber | None = None  # first batch after that checkpoint
        self.number: BatchNumber | None = None  # number of the current batch
        self.run_is_over = False  # True if the lead has ended the run; unused at the lead
        self._num_left = 0  # batches of the lane after the current one

    def __reduce__(self) -> tuple[type[SharedData], tuple[Trainer]]:  # a copy has no part in the run
        return SharedData, (self._trainer,)

    # ------------------------------------------------------------------ a run begins and ends

    def watch_hooks(self) -> None:
        """Run the user's hooks that make data inside `reading_data`, until `close`."""
        module, data = self._trainer.lightning_module, self._trainer.datamodule  # type: ignore[attr-defined]
        hooks = [(data, "setup"), (data, "train_dataloader"), (module, "train_dataloader")]
        is_overridden = tree_of(self._trainer).is_overridden
        self._hooks = [
            Override(owner, name, partial(_read_by, getattr(owner, name)))
            for owner, name in hooks
            if owner is not None and is_overridden(name, owner)
        ]

    def share(self, loader: DataLoader[Any], divided: Callable[[], DataLoader[Any]]) -> SharedLoader:
        """Return the loader that replaces the user's.

        If the loop has several loaders, their batches have no numbers, and the returned loader reads the loader that
        `divided` makes, with this trainer's part of the data.
        """
        self._origin = loader
        lane = LaneSampler(loader.batch_sampler, self._lane, self._lane_length)
        copied = copy.copy(loader)  # the user's class may have unknown constructor arguments
        vars(copied).update(batch_sampler=lane, _iterator=None)
        divided = cache(divided)  # `SharedLoader` asks repeatedly; None: it reads the lane
        self._loader = SharedLoader(copied, self._begin_batch, lambda: divided() if self._has_several_loaders else None)
        return self._loader

    def open(self, session: Session) -> None:
        """Connect to a run that has begun, before the loop's state is restored."""
        self._session = session
        fit_loop = self._trainer.fit_loop
        self._overrides = (
            Override(fit_loop, "on_save_checkpoint", self._save_with_plans),
            Override(fit_loop, "on_load_checkpoint", self._load_with_plans),
            Override(fit_loop.epoch_loop, "on_run_start", self._begin_epoch),
            Override(fit_loop.epoch_loop, "reset", self._quietly_reset),
            Override(fit_loop, "on_advance_start", self._receive_metrics),
        )
        own = [override.replaced for override in self._overrides]  # the loop's own methods, in the order above
        self._own_save, self._own_load, self._own_run_start, self._own_reset, self._own_advance_start = own

    def close(self) -> None:
        """Restore Lightning's loop and the user's hooks. May be called twice."""
        for override in (*self._overrides, *self._hooks):
            override.remove()
        self._overrides, self._hooks = (), ()

    @property
    def shares(self) -> bool:
        """Return whether the trainers share one order of batches, in which each batch has a number."""
        return self._loader is not None and not self._has_several_loaders

    @property
    def _has_several_loaders(self) -> bool:
        combined = self._trainer.fit_loop._combined_loader
        return combined is not None and len(combined.flattened) > 1

    @property
    def origin(self) -> DataLoader[Any] | None:
        """Return the user's loader, if the trainers share its batches."""
        return self._origin if self.shares else None

    # ------------------------------------------------------------------ batches

    def size(self, number: BatchNumber) -> int:
        """Return the number of samples of a batch: the indices in its sampler's list."""
        return len(self._indices(number))

    def numbers_between(self, first: BatchNumber, end: BatchNumber) -> Iterator[BatchNumber]:
        """Yield the numbers of the batches from `first` to before `end`, of the epochs whose plans are known."""
        for epoch, plan in sorted(self._plans.items()):
            yield from (number for index in range(plan.num_batches) if first <= (number := (epoch, index)) < end)

    @property
    def lane_end(self) -> BatchNumber | None:
        """Return the end of the epoch, if the current batch is the last of this trainer's lane."""
        if self.number is None or self._num_left:
            return None
        epoch, _ = self.number
        return epoch, self._plans[epoch].num_batches

    def read_batch(self, number: BatchNumber) -> Any:
        """Read a batch that is not in this trainer's lane, and convert it as Lightning does for `training_step`."""
        assert self._loader is not None
        trainer, module = self._trainer, self._trainer.lightning_module
        batch = self._loader.fetch(self._indices(number))
        combined = trainer.fit_loop._combined_loader
        assert combined is not None
        batch = tree_unflatten([batch], combined._spec)
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return tree_of(trainer).call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)

    def _indices(self, number: BatchNumber) -> list[Any]:
        """Return a batch's indices, after drawing its epoch's batches."""
        epoch, index = number
        self._plan_of(epoch)
        return self._listings[epoch][index]

    # ------------------------------------------------------------------ the lane

    def _lane(self) -> Iterator[tuple[BatchNumber, list[Any], int]]:
        """Yield the number and indices of each of this trainer's batches of the epoch, and how many batches follow."""
        epoch = self._trainer.current_epoch
        plan = self._plan_of(epoch)
        assert self._session is not None
        upcoming = None if plan is None else self._next_index(plan, plan.begin)
        while plan is not None and upcoming is not None and upcoming < plan.num_batches:
            index, upcoming = upcoming, self._next_index(plan, upcoming + 1)
            num_left = len(range(upcoming, plan.num_batches, len(self._session.lanes)))
            yield (epoch, index), self._listings[epoch][index], num_left

    def _next_index(self, plan: EpochPlan, index: int) -> int:
        """Return the lane's first uncounted batch at or after `index`, as the current trainers divide the epoch."""
        assert self._session is not None
        open_epoch, first_uncounted = self._session.run.position or (0, 0)
        if open_epoch == plan.epoch:
            index = max(index, first_uncounted)
        elif open_epoch > plan.epoch:
            index = plan.num_batches
        return next_in_lane(plan.begin, index, self._session.lanes, self._session.peer_id)

    def _lane_length(self) -> int:
        """Return the length of this trainer's lane in a whole epoch; Lightning applies a fractional limit itself."""
        limit = self._trainer.limit_train_batches
        length = len(self._origin) if isinstance(limit, float) else self.num_batches()
        return max(1, -(-length // (len(self._session.lanes) if self._session is not None else 1)))

    def num_batches(self) -> int:
        """Return the number of batches in an epoch of all trainers together."""
        length, limit = len(self._origin), self._trainer.limit_train_batches
        return int(length * limit) if isinstance(limit, float) else min(length, limit)

    def _begin_batch(self, number: BatchNumber, num_left: int) -> None:
        """Record the current batch, and set Lightning's limits by the number of batches that follow in this epoch."""
        self.number, self._num_left = number, num_left
        trainer, fit_loop = self._trainer, self._trainer.fit_loop
        fit_loop.max_batches = fit_loop.epoch_loop.batch_progress.current.ready + 1 + num_left
        if trainer.val_check_batch is not None and trainer.check_val_every_n_epoch is not None:
            # Validate at the end of the epoch at the latest, even if this trainer has few batches left.
            interval, num_batches = trainer.val_check_interval, fit_loop.max_batches
            check_batch = int(num_batches * interval) if isinstance(interval, float) else min(interval, num_batches)
            trainer.val_check_batch = max(1, check_batch)
        if fit_loop._data_fetcher is not None:
            fit_loop._data_fetcher.length = fit_loop._data_fetcher.fetched + 1 + num_left

    def _quietly_reset(self) -> None:
        """Reset the loop, without Lightning's warning if the batches are shared."""
        with without_resume_warning() if self.shares else nullcontext():
            self._own_reset()

    def _begin_epoch(self, data_fetcher: Any) -> None:
        """In a resumed epoch, lift the limit: Lightning counts all complete batches, maybe more than a lane has."""
        if self.shares and self._trainer.fit_loop.epoch_loop.batch_progress.current.ready:
            self._trainer.fit_loop.max_batches = float("inf")  # until `_begin_batch` sets it
        self._own_run_start(data_fetcher)

    # ------------------------------------------------------------------ plans

    def _plan_of(self, epoch: int) -> EpochPlan | None:
        """Return the plan of an epoch, after drawing its batches; None if the whole epoch is complete."""
        if epoch not in self._plans:
            assert self._session is not None
            if self._session.is_lead:
                self._publish_epoch(epoch)
            else:
                plan = self._received.pop(epoch, None) or self._wait_for_plan(epoch)
                if plan is None:
                    return None
                self._draw_and_check(plan)
        return self._plans[epoch]

    def _wait_for_plan(self, epoch: int) -> EpochPlan | None:
        """Wait for the lead's plan of an epoch; None if the epoch is complete, or the run is over."""
        assert self._session is not None
        try:
            return self._session.take_plan(epoch)
        except RunOver:
            self.run_is_over = self._trainer.should_stop = True
            return None

    def _receive_metrics(self) -> None:
        """Receive the metrics of the lead's validations when an epoch begins, before the user's hooks run."""
        epoch = self._trainer.current_epoch
        if self.shares and self._session is not None and not self._session.is_lead and epoch not in self._plans:
            plan = self._received[epoch] = self._wait_for_plan(epoch)
            metrics = {} if plan is None else plan.metrics
            values = {name: torch.tensor(value, dtype=torch.get_default_dtype()) for name, value in metrics.items()}
            self._trainer._logger_connector._callback_metrics.update(values)
        self._own_advance_start()

    def _publish_epoch(self, epoch: int) -> None:
        """Publish, at the lead, the plan of an epoch that begins or is resumed."""
        if self._start is None:
            self._start = self._first_position(epoch)
            older = sorted(older_epoch for older_epoch in self._restored if older_epoch < epoch)
            for older_epoch in older:  # drawing an epoch leaves the generators in the state for the next epoch
                plan = self._restored_plan(older_epoch)
                if older_epoch >= self._start[0]:  # its remaining batches are still to be trained on
                    self._publish(plan)
            if older and epoch not in self._restored:
                self._skip_workers_seed()
        self._publish(self._restored_plan(epoch) if epoch in self._restored else self._new_plan(epoch))

    def _skip_workers_seed(self) -> None:
        """Draw the workers' seed, as a loader does when an epoch begins."""
        # The loader has drawn it, but drawing older epochs again has reset the generator. Persistent workers draw none.
        origin = self._origin
        keeps_workers = origin.persistent_workers and origin.num_workers > 0
        if origin.generator is not None and not keeps_workers:
            torch.empty((), dtype=torch.int64).random_(generator=origin.generator)

    def _first_position(self, epoch: int) -> BatchNumber:
        """Return the first batch of this generation of the run."""
        if self._restored_position is not None:
            first_epoch, index = self._restored_position
            if index >= self._restored[first_epoch].num_batches:
                first_epoch, index = first_epoch + 1, 0
            return first_epoch, index
        progress: Any = self._trainer.fit_loop.epoch_progress.current
        if self._trainer.fit_loop.restarting and progress.ready > progress.processed:
            return epoch, min(self._trainer.fit_loop.epoch_loop.batch_progress.current.ready, self.num_batches())
        return epoch, 0

    def _new_plan(self, epoch: int) -> EpochPlan:
        """Draw an epoch's batches as a DataLoader would draw them now, and return their plan."""
        random = take_random_numbers(own_generators(self._origin))
        listing = self._listings[epoch] = self._draw_batches(epoch)
        return EpochPlan(
            epoch=epoch,
            begin=self._first_batch(epoch, len(listing)),
            sizes=listing.sizes,
            digest=listing.digest,
            random=random,
            last=self.is_last_epoch(epoch),
            metrics=callback_metrics(self._trainer),
            skipped=self._skipped(epoch, len(listing)),
        )

    def _skipped(self, epoch: int, num_batches: int) -> list[int]:
        skipped = skipped_batches(self._trainer)
        return sorted(index for of_epoch, index in skipped if of_epoch == epoch and index < num_batches)

    def _restored_plan(self, epoch: int) -> EpochPlan:
        """Draw an epoch's batches again as before the checkpoint, and return their plan."""
        plan = self._restored[epoch]
        self._draw_and_check(plan, "the checkpoint")
        begin, last = self._first_batch(epoch, plan.num_batches), self.is_last_epoch(epoch)
        metrics, skipped = callback_metrics(self._trainer), self._skipped(epoch, plan.num_batches)
        return replace_fields(plan, begin=begin, last=last, metrics=metrics, skipped=skipped)

    def is_last_epoch(self, epoch: int) -> bool:
        """Return whether the lead's loop ends with this epoch."""
        max_epochs = self._trainer.fit_loop.max_epochs
        return max_epochs not in (None, -1) and epoch + 1 >= max_epochs

    def _first_batch(self, epoch: int, num_batches: int) -> int:
        """Return the first batch of an epoch that this generation of the run trains on."""
        assert self._start is not None
        first_epoch, index = self._start
        if epoch == first_epoch:
            return index
        return 0 if epoch > first_epoch else num_batches

    def _publish(self, plan: EpochPlan) -> None:
        """Use a plan, and publish it for the other trainers."""
        assert self._session is not None
        assert self._start is not None
        self._plans[plan.epoch] = plan
        self._session.plan(plan, self._start)
        self._forget_old_epochs()

    def _draw_and_check(self, plan: EpochPlan, owner: str = "the lead") -> None:
        """Draw an epoch's batches with the plan's random numbers, and refuse the plan if they differ from it."""
        generators = own_generators(self._origin)
        listing = None
        if len(generators) == len(plan.random.own):
            with drawing_from(plan.random, generators):
                listing = self._draw_batches(plan.epoch)
        if listing is None or not listing.matches(plan):
            sampler = getattr(self._origin.batch_sampler, "sampler", self._origin.batch_sampler)
            own = f"{len(generators)} generators" if listing is None else f"{len(listing)} batches"
            other = f"{len(plan.random.own)} generators" if listing is None else f"{plan.num_batches} batches"
            raise ConfigError(
                f"all trainers must draw the same batches from the same random numbers: this trainer's {own} of "
                f"{type(sampler).__name__} in epoch {plan.epoch} differ from {owner}'s {other}. Use the same "
                "dataset, batch size and sampler, and let the sampler draw from the generators of torch, numpy or "
                "random; seed a `random_split`, by its `generator` or by `seed_everything`. Or set "
                "`use_distributed_sampler=False` in all trainers."
            )
        self._plans[plan.epoch], self._listings[plan.epoch] = plan, listing
        self._forget_old_epochs()

    def _draw_batches(self, epoch: int) -> EpochListing:
        """Draw an epoch's batches from the user's batch sampler, as a DataLoader would draw them now."""
        batches: Any = self._origin.batch_sampler
        for sampler in {id(sampler): sampler for sampler in (batches, getattr(batches, "sampler", None))}.values():
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)
        num_batches = self.num_batches()
        draws_end = self._origin.num_workers > 0 and num_batches == len(self._origin)
        return EpochListing(batches, num_batches, draws_end=draws_end, subset=subset_digest(self._origin.dataset))

    def _forget_old_epochs(self) -> None:
        position = self.position
        first = self._trainer.current_epoch if position is None else min(position[0], self._trainer.current_epoch)
        for epoch in [epoch for epoch in self._plans if epoch < first]:
            del self._plans[epoch], self._listings[epoch]

    # ------------------------------------------------------------------ the position in the data

    @property
    def position(self) -> BatchNumber | None:
        """The first batch that the current weights were not trained on."""
        assert self._session is not None
        return self._session.run.position or self._start

    def _save_with_plans(self) -> dict[str, Any]:
        """Add the plans and the position in the data to the loop's state."""
        state: dict[str, Any] = self._own_save()
        if self.shares and self.position is not None:
            plans = [torch.frombuffer(bytearray(encode(plan)), dtype=torch.uint8) for plan in self._plans.values()]
            state[STATE] = {"plans": plans, "position": list(self.position)}
        return state

    def _load_with_plans(self, state_dict: dict[str, Any]) -> None:
        """Read the plans and the position from a saved state, and load the loop's own state."""
        saved = state_dict.get(STATE)
        if saved is not None:
            plans = [decode(packed.numpy().tobytes(), EpochPlan) for packed in saved["plans"]]
            epoch, index = saved["position"]
            self._restored = {plan.epoch: plan for plan in plans}
            self._restored_position = (epoch, index) if epoch in self._restored else None
        self._own_load(state_dict)


def callback_metrics(trainer: Trainer) -> dict[str, float]:
    """Return the validation's scalar metrics that callbacks see, as many as fit into a plan."""
    metas = [entry.meta for entry in trainer.fit_loop.epoch_loop._results.values()]
    in_training = {name for meta in metas for name in (meta.name, meta.forked_name(True), meta.forked_name(False))}
    metrics = {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if name not in in_training and value.numel() == 1
    }
    ends = accumulate(len(name.encode()) + 16 for name in metrics)  # bytes of names and values up to each metric
    fit = (name for name, end in zip(metrics, ends, strict=True) if len(name) <= MAX_TEXT and end <= MAX_METRIC_BYTES)
    sent = {name: metrics[name] for name in islice(fit, MAX_PLAN_METRICS)}
    if unsent := sorted(metrics.keys() - sent):
        _log.warning("Other trainers do not get %d of the validation metrics: %s.", len(unsent), unsent[:3])
    return sent


@contextmanager
def without_resume_warning() -> Iterator[None]:
    """Silence Lightning's warning that a loader cannot resume in the middle of an epoch; in a swarm it can."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        yield


def set_position(checkpoint: Mapping[str, Any], position: BatchNumber | None) -> None:
    """Replace the position in the data that a checkpoint has, if it has one."""
    saved = checkpoint["loops"]["fit_loop"]["state_dict"].get(STATE)
    if saved is not None and position is not None:
        saved["position"] = list(position)


def can_share(loader: object, trainer: Trainer) -> TypeIs[DataLoader[Any]]:
    """Return whether trainers can share a loader, which needs a map-style dataset and a sampler with a length."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return (
        loader.batch_sampler is not None
        and isinstance(loader.batch_sampler, Sized)
        and not divides_itself(loader.sampler)
        and bool(trainer._accelerator_connector.use_distributed_sampler)
        and "dataloader_iter" not in inspect.signature(trainer.lightning_module.training_step).parameters
    )
