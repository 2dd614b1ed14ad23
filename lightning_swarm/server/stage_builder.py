"""A peer's own copy of the model, from which it builds the stages that it serves."""

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
from lightning_swarm.model.deferred_init import put_tensors
from lightning_swarm.model.fidelity.constants import built_numbers, constants, differing
from lightning_swarm.model.fidelity.module_states import copy_first_values
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
    offload: bool = False  # keep optimizers and their state on the CPU, if the device is not the CPU


class PeerModel:
    """A peer's own copy of the model: a LightningModule, or any other module, after `configure_model`."""

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
        remove_hooks(module)  # those of boundary layers, because stages call these layers themselves
        self.blocks = blocks  # the blocks between which the model is cut
        # Makes the user's optimizer over `module`'s parameters, given the run's number of steps; None: unknown.
        self._optimizer = optimizer
        self._template: OptimizerTemplate | None = None
        self.device = settings.device
        self._compiler = settings.compiler
        self.offloads = settings.offload and settings.device.type != "cpu"
        self.initial_weights = initial_weights  # a stage's initial tensors, at the peer that starts a run
        self._shared_ids: frozenset[int] = frozenset()  # ids of tensors that still belong to another module
        # The user's optimizer. User code may use it later, so `_replace` also replaces its parameters.
        self._built_optimizer: weakref.ref[Optimizer] | None = None

    @property
    def arithmetic(self) -> str:
        """Name the hardware and software that determine the bits of this peer's results; see `arithmetic_of`."""
        return arithmetic_of(self.device, offloads=self.offloads)

    def twin(self) -> PeerModel:
        """Return a model with a copy of the module; it shares this model's tensors until its stages are built."""
        module, blocks = partition.twin_of(self._module, self.blocks)
        copy_first_values(module, self._module)
        settings = ComputeSettings(self.device, self._compiler, self.offloads)
        model = PeerModel(module, blocks, self._optimizer, settings, initial_weights=self.initial_weights)
        model._shared_ids = frozenset(map(id, (*module.parameters(), *module.buffers())))
        return model

    def build_stages(self, ranges: Sequence[range]) -> tuple[StageModule, ...]:
        """Cut the model into stages of these ranges of blocks."""
        return partition.build_stages(self._module, self.blocks, ranges)

    def describe(self, ranges: Sequence[range], rosters: Sequence[list[Member]]) -> list[StageManifest]:
        """Describe the stages for the manifest; the last roster is for the stage on the trainers, if there is one."""
        return [
            StageManifest(
                first_block=blocks.start,
                end_block=blocks.stop,
                parameters=[(each.name, list(each.shape), each.dtype) for each in stage.spec.parameters],
                roster=roster,
                on_trainers=stage.spec.on_trainers,
                statistics=RunningStatistics(stage).length or UNSET,
                constants=self._constants(stage) or UNSET,
            )
            for blocks, stage, roster in zip([*ranges, range(0)], self.build_stages(ranges), rosters, strict=False)
        ]

    def _constants(self, stage: StageModule) -> dict[str, list[float]]:
        """Return values that all peers must build alike, without tensors of trainers' own layers, which may change."""
        if not stage.spec.on_trainers:
            return constants(stage.named_block_modules())
        inside = {id(module) for block in self.blocks.modules for module in block.modules()}
        return built_numbers((name, m) for name, m in self._module.named_modules() if name and id(m) not in inside)

    def check(self, manifest: Manifest) -> None:
        """Adopt the run's boundary layers; raise `ConfigError` with the first difference from the run's model."""
        if manifest.is_whole:
            self.blocks = partition.no_blocks(self._module)
        adopt_layers(self._module, {name: shape for stage in manifest.stages for name, shape, _ in stage.parameters})
        remove_hooks(self._module)
        num_blocks = len(self.blocks.modules)
        if any(stage.end_block > num_blocks for stage in manifest.stages):
            ends = [stage.end_block for stage in manifest.stages][:5]
            raise _other_model(f"this peer has {num_blocks} blocks, and the run's stages end at {ends}")
        own_stages = self.describe(ranges_of(manifest.stages), [[] for _ in manifest.stages])
        here, there = ([stage.on_trainers for stage in stages] for stages in (own_stages, manifest.stages))
        if here != there:
            raise _other_model(f"trainers compute the stages marked in {here} here, and in {there} in the run")
        for index, (own, theirs) in enumerate(zip(own_stages, manifest.stages, strict=True)):
            if own.statistics != theirs.statistics:
                numbers = f"{own.statistics or 0} numbers here and {theirs.statistics or 0} in the run"
                raise _other_model(f"the batch norms of stage {index} keep {numbers}")
            if own.parameters != theirs.parameters:
                specs = [{(name, (*s,), dtype) for name, s, dtype in each.parameters} for each in (own, theirs)]
                different = sorted({name for name, _, _ in specs[0] ^ specs[1]})
                raise _other_model(f"stage {index} differs in {different[:5]}")
            if names := differing(own.constants or {}, theirs.constants or {}):
                raise _other_model(
                    f"{few(sorted(names))}, which is no weight or buffer and so is not sent, has other values here. "
                    "Draw it after `seed_everything`, or make it a buffer with `register_buffer`"
                )

    def build(self, manifest: Manifest, served: Collection[int]) -> dict[int, Stage]:
        """Build the stages that this peer serves, without their weights; raise `ConfigError` as `check` does."""
        if self.device.type == "cuda":  # for blocks with the device "cuda"; Lightning sets it on its own thread only
            torch.cuda.set_device(self.device)
        self.check(manifest)
        modules = self.build_stages(ranges_of(manifest.stages))
        if manifest.selection is not None:
            check_selection(manifest.selection, manifest.stages)
            self._freeze(set(manifest.selection.frozen))
            self._template = self._template or self._make_template(manifest)
        self._free_all_but(modules, served)
        # Allocate tensors that were freed in an earlier run, were never made, or belong to another module. The run's
        # weights are loaded into them later.
        built = [module for module in modules if module.spec.index in served]
        self.fill({id(tensor) for module in built for tensor in module.named_stage_tensors().values()})
        # One optimizer per stage, because stages move apart with their parameter groups.
        return {index: self._stage(modules[index], manifest) for index in sorted(served)}

    def build_borrowed(self, manifest: Manifest, index: int) -> Stage:
        """Build a stage that this peer does not serve, with its own tensors; weights are loaded later."""
        twin = self.twin()
        twin._template = self._template
        return twin.build(manifest, [index])[index]

    def keep_only(self, manifest: Manifest, served: Collection[int]) -> None:
        """Free the memory of the stages that are not served any more, on the compute thread."""
        self._free_all_but(self.build_stages(ranges_of(manifest.stages)), served)

    def _make_template(self, manifest: Manifest) -> OptimizerTemplate:
        """Make the user's optimizer, once, while the module has its original parameters."""
        optimizer = self._optimizer(manifest.total_steps)
        if manifest.optimizer is not None and kind_of(optimizer) != manifest.optimizer:
            raise ConfigError(
                f"every peer must build the optimizer of the run, {manifest.optimizer}; this peer builds "
                f"{kind_of(optimizer)}. Start all peers with the same script, versions and settings."
            )
        if not self._shared_ids:
            self._built_optimizer = weakref.ref(optimizer)
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        return OptimizerTemplate(optimizer, names)

    def _stage(self, module: StageModule, manifest: Manifest) -> Stage:
        """Return a stage with its own optimizer and the settings of the run."""
        if self._compiler is not None and not module.spec.on_trainers:
            module.compile_by(self._compiler)
        parameters = dict(module.named_stage_parameters())
        optimizer = self._template.cut(parameters) if self._template and manifest.selection is not None else None
        clip, delays = manifest.gradient_clip_value, manifest.settings.delay_optimizer_step
        stage = Stage(
            module,
            StageOptimizer(optimizer, parameters, clip_value=clip, offload=self.offloads, separate_objects=delays),
            self.device,
            version=manifest.first_step,
            codecs=Codecs.of(manifest.settings.compression),
            keeps_previous=delays,
            exact=manifest.settings.deterministic,
        )
        if manifest.selection is not None:
            stage.select(manifest.selection)
        return stage

    def _freeze(self, frozen: Collection[str]) -> None:
        """Freeze the parameters that the lead's callbacks froze, so that `configure_optimizers` finds the same here."""
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad == (name in frozen):
                parameter.requires_grad_(name not in frozen)

    def _free_all_but(self, stages: Sequence[StageModule], served: Collection[int]) -> None:
        """Move the other stages' parameters to the meta device."""
        parameters = {stage.spec.index: dict(stage.named_stage_parameters()).values() for stage in stages}
        kept = {id(parameter) for index in served for parameter in parameters[index]}
        every = {id(parameter): parameter for of_stage in parameters.values() for parameter in of_stage}
        self._replace(
            {
                key: nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                for key, parameter in every.items()
                if key not in kept
            }
        )

    def fill(self, ids: Collection[int] | None = None) -> None:
        """Allocate the tensors without memory of their own, or those with these ids; their values are loaded later."""
        tensors = {id(tensor): tensor for tensor in (*self._module.parameters(), *self._module.buffers())}
        lacking = {key for key, tensor in tensors.items() if tensor.is_meta or key in self._shared_ids}
        wanted = lacking if ids is None else lacking.intersection(ids)
        self._replace({key: self._allocated(tensors[key]) for key in wanted})

    def _replace(self, replaced: Mapping[int, Tensor]) -> None:
        """Replace tensors: id of the old tensor -> new tensor."""
        put_tensors(self._module, replaced)
        if self._built_optimizer is not None and (optimizer := self._built_optimizer()) is not None:
            replace_parameters(optimizer, {key: new for key, new in replaced.items() if isinstance(new, nn.Parameter)})

    def _allocated(self, tensor: Tensor) -> Tensor:
        """Return a tensor with memory of its own: a copy, or NaN (0 for integers) if it is on meta."""
        if not tensor.is_meta:
            return copy.deepcopy(tensor) if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
        filler = float("nan") if tensor.is_floating_point() else 0
        made = torch.full_like(tensor, filler, device=self.device)
        return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _other_model(difference: str) -> ConfigError:
    return ConfigError(
        f"every peer must build the model of the run; {difference}. "
        "Start all peers with the same script, versions and settings."
    )
