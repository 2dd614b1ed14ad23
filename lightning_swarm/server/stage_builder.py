"""A peer's own copy of the model: cut into stages, of which the peer builds those it serves."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import UNSET
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.readable import few
from lightning_swarm.model import partition
from lightning_swarm.model.boundary_layers import adopt_layers, remove_hooks
from lightning_swarm.model.constants import built_numbers, constants, differing
from lightning_swarm.model.deferred_init import put_tensors
from lightning_swarm.model.module_states import remember_copy
from lightning_swarm.model.optimizer_state import kind_of
from lightning_swarm.model.optimizer_template import OptimizerTemplate, replace_parameters
from lightning_swarm.model.partition import Blocks, StageModule
from lightning_swarm.model.running_statistics import RunningStatistics
from lightning_swarm.protocol.compression import Codecs
from lightning_swarm.protocol.messages.run import Manifest, Member, StageManifest, check_selection, ranges_of
from lightning_swarm.server.arithmetic import arithmetic_of
from lightning_swarm.server.optimizer import StageOptimizer
from lightning_swarm.server.stage import Stage


@dataclass(frozen=True)
class ComputeSettings:
    """Device, compiler and offloading of a peer's stages."""

    device: torch.device
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None  # see `StageModule.compile_by`
    offload: bool = False  # have optimizers and their state on the CPU, if the device is another one


class PeerModel:
    """A peer's own copy of the model: a LightningModule (or any module), after `configure_model`."""

    def __init__(
        self,
        module: nn.Module,
        blocks: Blocks,
        optimizer: Callable[[int | None], Optimizer],
        settings: ComputeSettings,
        *,
        initial_weights: Callable[[StageModule], Mapping[str, Tensor]] = StageModule.named_stage_tensors,
    ) -> None:
        self._module = module
        remove_hooks(module)  # a stage computes the layers at its ends in part
        self.blocks = blocks  # where it is cut
        # The user's optimizer over `module`'s parameters; gets the run's number of steps, if that is known.
        self._optimizer = optimizer
        self._template: OptimizerTemplate | None = None
        self.device = settings.device
        self._compiler = settings.compiler
        self.offloads = settings.offload and settings.device.type != "cpu"
        self.initial_weights = initial_weights  # what a stage's parameters and buffers are at first, at a run's starter
        self._foreign: frozenset[int] = frozenset()  # ids of tensors that belong to another module
        # The module may have kept its optimizer, and may come to train with it.
        self._made: weakref.ref[Optimizer] | None = None

    @property
    def arithmetic(self) -> str:
        """Name what the bits of this peer's results depend on; see `arithmetic_of`."""
        return arithmetic_of(self.device, offloads=self.offloads)

    def twin(self) -> PeerModel:
        """The model of a server beside this one's module: it has tensors of its own, once it is built."""
        module, blocks = partition.twin_of(self._module, self.blocks)
        remember_copy(module, self._module)
        settings = ComputeSettings(self.device, self._compiler, self.offloads)
        model = PeerModel(module, blocks, self._optimizer, settings, initial_weights=self.initial_weights)
        model._foreign = frozenset(map(id, (*module.parameters(), *module.buffers())))
        return model

    def build_stages(self, ranges: Sequence[range]) -> tuple[StageModule, ...]:
        """Cut the model into stages of these ranges of blocks."""
        return partition.build_stages(self._module, self.blocks, ranges)

    def describe(self, ranges: Sequence[range], rosters: Sequence[list[Member]]) -> list[StageManifest]:
        """Describe the stages for the manifest; the last roster is of the stage on the trainers, needed or not."""
        return [
            StageManifest(
                first_block=blocks.start,
                end_block=blocks.stop,
                parameters=[(own.name, list(own.shape), own.dtype) for own in stage.spec.parameters],
                roster=roster,
                on_trainers=stage.spec.on_trainers,
                statistics=RunningStatistics(stage).length or UNSET,
                constants=self._constants(stage) or UNSET,
            )
            for blocks, stage, roster in zip([*ranges, range(0)], self.build_stages(ranges), rosters, strict=False)
        ]

    def _constants(self, stage: StageModule) -> dict[str, list[float]]:
        """Return the values that peers must have built alike. Forwards and hooks may change trainers' tensors."""
        if not stage.spec.on_trainers:
            return constants(stage.named_block_modules())
        inside = {id(module) for block in self.blocks.modules for module in block.modules()}
        return built_numbers((name, m) for name, m in self._module.named_modules() if name and id(m) not in inside)

    def check(self, manifest: Manifest) -> None:
        """Refuse a run of another model with a `ConfigError` that names the first field that differs."""
        if manifest.is_whole:
            self.blocks = partition.no_blocks(self._module)
        # Boundary layers are the run's: they come and go with it.
        adopt_layers(self._module, {name: shape for stage in manifest.stages for name, shape, _ in stage.parameters})
        remove_hooks(self._module)
        num_blocks = len(self.blocks.modules)
        if any(stage.end_block > num_blocks for stage in manifest.stages):
            ends = [stage.end_block for stage in manifest.stages][:5]
            raise _other_model(f"this one has {num_blocks} blocks, the run's stages end at {ends}")
        own_stages = self.describe(ranges_of(manifest.stages), [[] for _ in manifest.stages])
        kinds = [[stage.on_trainers for stage in stages] for stages in (own_stages, manifest.stages)]
        if kinds[0] != kinds[1]:
            raise _other_model(f"which of its stages are on the trainers is {kinds[0]} here and {kinds[1]} there")
        for index, (own, theirs) in enumerate(zip(own_stages, manifest.stages, strict=True)):
            if own.statistics != theirs.statistics:
                numbers = f"{own.statistics or 0} numbers here and {theirs.statistics or 0} there"
                raise _other_model(f"the batch norms of stage {index} keep {numbers}")
            if own.parameters != theirs.parameters:
                here, there = ({(name, tuple(s), dtype) for name, s, dtype in one.parameters} for one in (own, theirs))
                raise _other_model(f"stage {index} differs in {sorted({name for name, _, _ in here ^ there})[:5]}")
            if names := differing(own.constants or {}, theirs.constants or {}):
                raise _other_model(
                    f"{few(sorted(names))}, which no weight or buffer holds, and no peer gets, has other values here. "
                    "Draw it after `seed_everything`, or make it a buffer, by `register_buffer`"
                )

    def build(self, manifest: Manifest, served: Collection[int]) -> dict[int, Stage]:
        """Build the stages that this peer serves; they compute once weights are loaded. Raises as `check` does."""
        if self.device.type == "cuda":  # for blocks that ask for "cuda"; Lightning does this on its own thread
            torch.cuda.set_device(self.device)
        self.check(manifest)
        modules = self.build_stages(ranges_of(manifest.stages))
        if manifest.selection is not None:
            check_selection(manifest.selection, manifest.stages)
            self._freeze(set(manifest.selection.frozen))
            self._template = self._template or self._make_template(manifest)
        self._free_all_but(modules, served)
        # Freed for an earlier run, never made, or another module's. Their values come with the run.
        built = [module for module in modules if module.spec.index in served]
        self.fill({id(tensor) for module in built for tensor in module.named_stage_tensors().values()})
        # One optimizer for each stage: stages move apart, and their parameter groups with them.
        return {index: self._stage(modules[index], manifest) for index in sorted(served)}

    def borrowed(self, manifest: Manifest, index: int) -> Stage:
        """Build a stage that this peer does not serve, with tensors of its own; its weights are still to come."""
        twin = self.twin()
        twin._template = self._template
        return twin.build(manifest, [index])[index]

    def keep_only(self, manifest: Manifest, served: Collection[int]) -> None:
        """Free the memory of the stages that are not served any more. On the compute thread."""
        self._free_all_but(self.build_stages(ranges_of(manifest.stages)), served)

    def _make_template(self, manifest: Manifest) -> OptimizerTemplate:
        """Have the user's optimizer made, once, while it finds the parameters that the module has from its author."""
        optimizer = self._optimizer(manifest.total_steps)
        if manifest.optimizer is not None and kind_of(optimizer) != manifest.optimizer:
            raise ConfigError(
                f"every peer must build the optimizer of the run, which is {manifest.optimizer}; this one builds "
                f"{kind_of(optimizer)}. Start all peers with the same script, versions and settings."
            )
        if not self._foreign:
            self._made = weakref.ref(optimizer)
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        return OptimizerTemplate(optimizer, names)

    def _stage(self, module: StageModule, manifest: Manifest) -> Stage:
        if self._compiler is not None and not module.spec.on_trainers:
            module.compile_by(self._compiler)
        parameters = dict(module.named_stage_parameters())
        optimizer = self._template.cut(parameters) if self._template and manifest.selection is not None else None
        clip_value, delays = manifest.gradient_clip_value, manifest.settings.delay_optimizer_step
        stage = Stage(
            module,
            StageOptimizer(optimizer, parameters, clip_value=clip_value, offload=self.offloads, apart=delays),
            self.device,
            version=manifest.first_step,
            codecs=Codecs.of(manifest.settings.compression),
            keeps_before=delays,
            exact=manifest.settings.deterministic,
            audited=manifest.settings.is_audited,
        )
        if manifest.selection is not None:
            stage.select(manifest.selection)
        return stage

    def _freeze(self, frozen: Collection[str]) -> None:
        """Freeze what the lead's callbacks froze, so that `configure_optimizers` finds here what it found there."""
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad == (name in frozen):
                parameter.requires_grad_(name not in frozen)

    def _free_all_but(self, stages: Sequence[StageModule], served: Collection[int]) -> None:
        """Move the other stages' parameters to meta."""
        parameters = {stage.spec.index: dict(stage.named_stage_parameters()).values() for stage in stages}
        own = {id(parameter) for index in served for parameter in parameters[index]}
        foreign = {id(parameter): parameter for others in parameters.values() for parameter in others}
        self._replace(
            {
                key: nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                for key, parameter in foreign.items()
                if key not in own
            }
        )

    def fill(self, ids: Collection[int] | None = None) -> None:
        """Give memory of their own to tensors that have none, all or those with these ids; values are still to come."""
        tensors = {id(tensor): tensor for tensor in (*self._module.parameters(), *self._module.buffers())}
        lacking = {key for key, tensor in tensors.items() if tensor.is_meta or key in self._foreign}
        wanted = lacking if ids is None else lacking.intersection(ids)
        self._replace({key: self._own(tensors[key]) for key in wanted})

    def _replace(self, replaced: Mapping[int, Tensor]) -> None:
        """Put tensors in the place of others, by the ids of those."""
        put_tensors(self._module, replaced)
        if self._made is not None and (optimizer := self._made()) is not None:
            replace_parameters(optimizer, {key: new for key, new in replaced.items() if isinstance(new, nn.Parameter)})

    def _own(self, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return copy.deepcopy(tensor) if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
        nothing = float("nan") if tensor.is_floating_point() else 0
        made = torch.full_like(tensor, nothing, device=self.device)
        return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _other_model(difference: str) -> ConfigError:
    return ConfigError(
        f"every peer must build the model of the run; {difference}. "
        "Start all peers with the same script, versions and settings."
    )
