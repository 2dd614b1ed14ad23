"""Finds the blocks of a model, their order, and the module whose forward they replace."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.readable import few
from lightning_swarm.model.boundary_layers import boundary_layers
from lightning_swarm.model.nn import Sequential
from lightning_swarm.model.partition.stages import Named, named_within

_HOOK: Final = "configure_stages"
_REMEDY: Final = (
    "Put the model into one `torch.nn.Sequential`, or name a `Sequential` or a `ModuleList` of blocks with "
    f"`pipeline=...`, or define `{_HOOK}(self)` that returns the blocks in order. If the model fits on each "
    "machine, leave it whole: `num_stages=1, role='both', target_batch_size=...`."
)


@dataclass(frozen=True)
class Blocks:
    """The chain of blocks that is partitioned into stages."""

    root: nn.Module  # the module whose forward the chain replaces, or the list whose blocks are called one by one
    root_name: str  # the root's dotted name in the model; empty for the model itself
    names: tuple[str, ...]  # unique names of the blocks, which may differ from their names in the model
    modules: tuple[nn.Module, ...]  # their parameters must be the model's

    @property
    def is_empty(self) -> bool:
        """True if nothing is cut: each trainer computes the whole model itself."""
        return not self.modules

    @property
    def one_by_one(self) -> bool:
        """True if the user's own forward calls the blocks, because the root is a list and has no forward."""
        return isinstance(self.root, nn.ModuleList)

    def named_modules(self) -> list[Named]:
        """Return all modules in blocks, with names that begin with the block's name."""
        return named_within(zip(self.names, self.modules, strict=True))


def no_blocks(model: nn.Module) -> Blocks:
    """Return an empty chain, for a LightningModule that is not cut: its parameters are one stage, on the trainers."""
    return Blocks(model, "", (), ())


def defines_stages(model: nn.Module) -> bool:
    """Return whether a LightningModule defines `configure_stages`."""
    return callable(getattr(model, _HOOK, None))


def can_be_cut(model: nn.Module) -> bool:
    """Return whether a LightningModule has a chain of blocks that `find_blocks` finds without a name."""
    try:
        find_blocks(model, None)
    except ConfigError:
        return False
    return True


def find_blocks(model: nn.Module, pipeline: str | None) -> Blocks:
    """Find the chain of blocks of a LightningModule, whose parameters may be on meta.

    `pipeline` names a `Sequential`, or a `ModuleList` whose blocks the model's own forward calls; None: find the only
    `Sequential` that holds all parameters.
    """
    name, root = ("", model) if pipeline is None else (pipeline, _submodule(model, pipeline))
    if defines_stages(model):
        return _configured(model, name, root)
    if pipeline is None:
        name, root = _only_sequential(model)
    elif not isinstance(root, nn.Sequential | nn.ModuleList):
        raise ConfigError(
            f"`pipeline` must name a `torch.nn.Sequential` or a `torch.nn.ModuleList` (or the model must define "
            f"`{_HOOK}`), but {name!r} is a {type(root).__name__}. " + _choices(model)
        )
    if isinstance(root, nn.Sequential):
        _refuse_own_forward(root, name)
    return _checked(_children_of(container=root, root=root, root_name=name))


def _refuse_own_forward(root: nn.Module, name: str) -> None:
    plain = (nn.Sequential.forward, Sequential.forward)
    if "forward" in vars(root) or type(root).forward not in plain:
        raise ConfigError(
            "a `Sequential` that is cut must run its blocks one after the other and do nothing else, got "
            f"{type(root).__name__} {name!r} with a `forward` of its own. Move its additions into a block, or define "
            f"`{_HOOK}(self)` that returns the blocks in order."
        )


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise ConfigError(
            f"`pipeline` must be the dotted name of a submodule of {type(model).__name__}, got {name!r}. "
            + _choices(model)
        ) from error


def _only_sequential(model: nn.Module) -> tuple[str, nn.Sequential]:
    """Find the outermost `Sequential` with all parameters but those of boundary layers; refuse none or several."""
    boundary_parts = {id(part) for layer in boundary_layers(model).values() for part in layer.parameters()}
    parameters = {id(parameter) for parameter in model.parameters()} - boundary_parts
    if not parameters:
        raise ConfigError(
            f"a model must have parameters to be cut, got {type(model).__name__} without any. "
            "Create its layers in `__init__` or `configure_model`."
        )
    outermost: list[tuple[str, nn.Sequential]] = []
    for name, module in model.named_modules():
        is_inside = any(not outer or name.startswith(f"{outer}.") for outer, _ in outermost)
        if isinstance(module, nn.Sequential) and not is_inside and parameters <= set(map(id, module.parameters())):
            outermost.append((name, module))
    if len(outermost) != 1:
        got = "none" if not outermost else "several (" + ", ".join(name for name, _ in outermost) + ")"
        raise ConfigError(
            f"with `pipeline=None`, the model must define `{_HOOK}` or have one `torch.nn.Sequential` that "
            f"holds all its parameters, got {got} in {type(model).__name__}. {_fullest_list(model)}{_REMEDY}"
            + _outside(model)
        )
    return outermost[0]


def _configured(model: nn.Module, name: str, root: nn.Module) -> Blocks:
    """Return the blocks that `configure_stages` lists, which replace the forward of `root`."""
    if isinstance(root, nn.ModuleList):
        raise ConfigError(
            f"with `{_HOOK}`, `pipeline` must name a module with a forward, which the blocks replace: got the "
            f"`ModuleList` {name!r} in {type(model).__name__}. Name the module that runs the blocks, or leave out "
            f"`pipeline` or `{_HOOK}`."
        )
    result: object = getattr(model, _HOOK)()
    if isinstance(result, nn.ModuleDict | nn.ModuleList | nn.Sequential):
        return _checked(_children_of(result, root, name))
    if not isinstance(result, Sequence) or not all(isinstance(block, nn.Module) for block in result):
        kinds = sorted({type(block).__name__ for block in result}) if isinstance(result, Sequence) else []
        raise ConfigError(
            f"`{_HOOK}` must return a sequence of modules or a `torch.nn.ModuleDict`, got "
            f"{type(result).__name__}{' of ' + ', '.join(kinds) if kinds else ''}. "
            "Return the blocks in the order in which they run, such as `[self.embed, *self.layers, self.head]`."
        )
    return _checked(Blocks(root, name, tuple(map(str, range(len(result)))), tuple(result)))


def _children_of(container: nn.Module, root: nn.Module, root_name: str) -> Blocks:
    # Not `named_children()`, which omits a module that appears a second time.
    children = {name: module for name, module in container._modules.items() if module is not None}
    return Blocks(root, root_name, tuple(children), tuple(children.values()))


def _checked(blocks: Blocks) -> Blocks:
    where = f"{blocks.root_name!r}" if blocks.root_name else f"{type(blocks.root).__name__}"
    if not blocks.modules:
        raise ConfigError(f"a pipeline must have at least one block, got none in {where}. Give it blocks.")
    for name, module in zip(blocks.names, blocks.modules, strict=True):
        if any(inner is blocks.root for inner in module.modules()):
            raise ConfigError(
                f"a block must be a part of the module that the blocks replace, but block {name!r} contains {where} "
                "itself. Return its layers instead."
            )
    return blocks


def _choices(model: nn.Module) -> str:
    boundary_parts = {id(part) for layer in boundary_layers(model).values() for part in layer.modules()}
    candidates = [(name, module) for name, module in model.named_modules() if name and id(module) not in boundary_parts]
    names = [name for name, module in candidates if isinstance(module, nn.Sequential | nn.ModuleList)]
    if not names:
        return f"The model has neither a `Sequential` nor a `ModuleList`. {_REMEDY}"
    return f"Choose one of its `Sequential`s and `ModuleList`s ({few(names)}), or define `{_HOOK}(self)`."


def _fullest_list(model: nn.Module) -> str:
    """Suggest to cut the model's largest list of blocks, which most models without a `Sequential` have."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    sizes = {name: sum(map(Tensor.numel, module.parameters())) for name, module in lists.items()}
    if not any(sizes.values()):
        return ""
    return (
        f"Cut its list of blocks with `pipeline={max(sizes, key=lambda name: sizes[name])!r}`, or choose another way. "
    )


def _outside(model: nn.Module) -> str:
    """Name the parameters outside of the fullest `Sequential`, which often are one forgotten layer."""
    candidates = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Sequential)]
    if not candidates:
        return ""
    name, fullest = max(candidates, key=lambda pair: len(set(map(id, pair[1].parameters()))))
    held = set(map(id, fullest.parameters()))
    outside = [parameter for parameter, value in model.named_parameters() if id(value) not in held]
    if not outside or not held:
        return ""
    return f" Outside of {name!r} are: {few(outside)}."
