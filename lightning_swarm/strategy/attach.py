"""`AttachStrategy`: tunes an adapter in this process, with Lightning's own loop, over a model that a swarm serves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from lightning_swarm.client.inference.adapters import check_kind, find_adapters
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.override import changed
from lightning_swarm.core.rebase import written_once
from lightning_swarm.model.pretrained import dtype_of
from lightning_swarm.serving.remote_model import ServedModelClient, connect

if TYPE_CHECKING:
    _SingleDeviceStrategy = SingleDeviceStrategy
else:
    _SingleDeviceStrategy = object

_INITS: Final = (True, False, "gaussian", "orthogonal")  # peft's other methods need the adapted layers' weights
# The Trainer's precision -> dtype that the served model must have; other precisions fit any dtype.
_DTYPES: Final = {"16-true": "float16", "bf16-true": "bfloat16", "64-true": "float64"}


@written_once(SingleDeviceStrategy)
class AttachStrategy(_SingleDeviceStrategy):
    """Trains the layers that a LightningModule adds to a served model: LoRA in its blocks, prompts, or a head.

    The blocks are computed by servers of ``lightning-swarm serve``; their weights stay there and do not change. The
    adapter, its optimizer and its checkpoints are this process's own, so all of Lightning's loop works as on one
    device: accumulation, clipping, schedulers, several optimizers, manual optimization. Many users may tune over the
    same servers. If a server dies, another server computes the same values.

    The servers see hidden states and the adapter, so use only servers that you trust with them.

    Args:
        address: A server's address, as the server prints it: ``HOST:PORT/ID``.
        invite: File with an invitation of the role ``trainer``, if the servers accept only invited peers.
        weights: The model's folder, if it is on this machine. None: weights outside the blocks come from a server.
        device: Device for all layers outside the blocks.
        microbatch_size: Rows of a batch that a server computes at once. None: small enough to keep all stages busy.
        timeout: Seconds that a call of a stage may take, retries on other servers included.

    Raises:
        ConfigError: The address, the invitation or the folder does not belong to a served model.
        Unreachable: No server answers at the address.

    Example:
        >>> strategy = AttachStrategy("203.0.113.7:31337/12D3...")
        >>> model = get_peft_model(strategy.base_model(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
        >>> L.Trainer(strategy=strategy, max_steps=500).fit(MyTuning(model), data)
        >>> model.save_pretrained("my-adapter")
    """

    strategy_name = "attach"

    def __init__(
        self,
        address: str,
        *,
        invite: str | None = None,
        weights: str | Path | None = None,
        device: str | torch.device = "cpu",
        microbatch_size: int | None = None,
        timeout: float = 300.0,
    ) -> None:
        super().__init__(torch.device(device))
        if microbatch_size is not None and microbatch_size < 1:
            raise ConfigError(f"`microbatch_size` must be at least 1, got {microbatch_size}. Raise it.")
        self._client: ServedModelClient = connect(
            address,
            invite=invite,
            weights=weights,
            device=self.root_device,
            timeout=timeout,
            adapts=True,
            microbatch_size=microbatch_size,
        )

    def base_model(self) -> Any:
        """Return the served model as a Hugging Face model; ``model.swarm`` has its ``tokenizer()`` and ``close()``."""
        return self._client.model

    @override
    def setup(self, trainer: Trainer) -> None:
        num_devices = len(trainer._accelerator_connector._parallel_devices)  # the base class would use only the first
        if num_devices > 1:
            raise ConfigError(
                f"an adapter is tuned by one process, got `devices={num_devices}`. Use `devices=1`: servers compute in "
                "parallel."
            )
        module = self.lightning_module
        assert module is not None
        self._check(module)
        super().setup(trainer)

    def _check(self, module: LightningModule) -> None:
        """Refuse a module that cannot be tuned over servers, before training begins."""
        base, card = self._client.model, self._client.card
        if not any(submodule is base for submodule in module.modules()):
            raise ConfigError(
                f"a LightningModule must hold the served model that it tunes, but {type(module).__name__} does not. "
                "Build it with the model from `strategy.base_model()`, or with a peft model around that model."
            )
        wanted = _DTYPES.get(str(module.trainer.precision))
        if wanted is not None and dtype_of(wanted) != dtype_of(card.dtype):
            raise ConfigError(
                f"`precision={module.trainer.precision!r}` must fit the served model, whose weights are {card.dtype}. "
                f"Leave it out, or have the model served with `--dtype {wanted}`."
            )
        for submodule in module.modules():
            for config in getattr(submodule, "peft_config", {}).values():
                _check_peft(config)
        find_adapters(self._client.blocks, card.ranges)

    @override
    def model_to_device(self) -> None:
        """Move the module's own tensors only; moving a placeholder of a served weight would allocate its full size."""
        assert self.lightning_module is not None
        placeholders, device = set(map(id, self._client.placeholders)), self.root_device
        for submodule in self.lightning_module.modules():
            for parameter in submodule._parameters.values():
                if parameter is not None and id(parameter) not in placeholders:
                    parameter.data = parameter.data.to(device)
            for name, buffer in submodule._buffers.items():
                if buffer is not None and id(buffer) not in placeholders:
                    submodule._buffers[name] = buffer.to(device)

    @override
    def teardown(self) -> None:
        with changed(self, _lightning_module=None):  # so that the base class does not move the module to the CPU
            super().teardown()

    def _served_names(self) -> set[str]:
        """Return the module's names for the placeholders of served weights."""
        placeholders = set(map(id, self._client.placeholders))
        module = self.lightning_module
        assert module is not None
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        return {name for name, tensor in named if id(tensor) in placeholders}

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        served = self._served_names()
        return {name: value for name, value in super().lightning_module_state_dict().items() if name not in served}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        keys = module.load_state_dict(checkpoint["state_dict"], strict=False)
        missing = sorted(set(keys.missing_keys) - self._served_names())
        if strict and (missing or keys.unexpected_keys):
            raise ConfigError.like(
                RuntimeError,
                "a checkpoint must have the module's tensors outside the served model's blocks, and no others: "
                f"{missing[:5]} are missing, {keys.unexpected_keys[:5]} unexpected. Load it into the module that saved "
                "it.",
            )


def _check_peft(config: Any) -> None:
    check_kind(config)
    if hasattr(config, "init_lora_weights") and config.init_lora_weights not in _INITS:
        raise ConfigError(
            f"`init_lora_weights` must not need the weights of the blocks, which are on the servers; got "
            f"{config.init_lora_weights!r}. Use True or 'gaussian'."
        )
