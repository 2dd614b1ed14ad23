"""Adapters tuned over servers have the losses, weights and files of peft with the plain Trainer on one machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import peft
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_swarm import AttachStrategy
from lightning_swarm.core.errors import ConfigError, StageError
from lightning_swarm.model.random import KeyedRandom
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.rpc import TUNE_FETCH, TUNE_FORWARD
from lightning_swarm.serving.tuning_client import Chain, seed_of
from lightning_swarm.strategy import attach
from tests.parity.harness import LOSS_TOLERANCE, QUIET, WEIGHT_TOLERANCE, quiet_warnings
from tests.served import ServedSwarm, make_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:Found .* in eval mode"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing"),  # peft asks for it
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
]

STEPS = 50
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
LINEAR = ["q_proj", "v_proj", "down_proj"]


def lora(model: Any, **options: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(**{**LORA, "target_modules": LINEAR, **options}))


def prompts(model: Any) -> Any:
    return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def p_tuning(model: Any) -> Any:
    config = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8)
    return peft.get_peft_model(model, config)


def head(model: Any) -> Any:
    model.requires_grad_(False)
    model.lm_head = nn.Linear(16, 29, dtype=torch.float64)
    return model


KINDS = {"LoRA": lora, "rank-stabilised LoRA": lambda model: lora(model, use_rslora=True), "prompt tuning": prompts}
KINDS |= {"p-tuning": p_tuning, "a head": head}


class Tuning(L.LightningModule):
    """An ordinary module that takes the model as an argument."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []
        self.validated: list[float] = []

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.append(self.model(input_ids=batch[0], labels=batch[0]).loss.item())

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-2)


def data(seed: int = 0) -> DataLoader[Any]:
    ids = torch.randint(1, 29, (24, 7), generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(ids), batch_size=6)


def tune(
    made: Any,
    strategy: Any,
    *,
    seed: int = 0,
    steps: int = STEPS,
    ckpt_path: Path | None = None,
    kind: type[Tuning] = Tuning,
    **options: Any,
) -> Tuning:
    module = kind(made)
    options = {**QUIET, "devices": 1, "max_steps": steps, "max_epochs": -1, "gradient_clip_val": 1.0, **options}
    options |= {"accumulate_grad_batches": 2, "val_check_interval": 4, "check_val_every_n_epoch": None}
    with quiet_warnings():
        L.Trainer(strategy=strategy, **options).fit(module, data(seed), data(seed + 1), ckpt_path=ckpt_path)
    return module


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[ServedSwarm]:
    make_model("llama").save_pretrained(tmp_path / "base")
    with closing(ServedSwarm(tmp_path / "base", num_stages=2)) as made:
        made.serve("a")
        for name in "bc":
            made.serve(name, join="a", share=0.5, has_files=False)
        yield made


def attached(
    swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch, name: str = "client", **options: Any
) -> AttachStrategy:
    """Return a strategy that is connected over the in-memory network."""

    def connect(address: str, **more: Any) -> Any:
        more = {key: value for key, value in more.items() if key in ("weights", "adapts", "microbatch_size")}
        swarm.connect(name=name, **more)
        return swarm.client

    monkeypatch.setattr(attach, "connect", connect)
    return AttachStrategy("127.0.0.1:1/a", **options)


def plain_base(swarm: ServedSwarm) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(swarm.folder, dtype=torch.float64)


def assert_equal(found: Tuning, plain: Tuning) -> None:
    assert found.losses == pytest.approx(plain.losses, rel=LOSS_TOLERANCE)
    assert found.validated == pytest.approx(plain.validated, rel=LOSS_TOLERANCE)
    trained = {name: one for name, one in plain.named_parameters() if one.requires_grad}
    own = dict(found.named_parameters())
    assert trained
    for name, weight in trained.items():
        assert float((own[name] - weight).detach().abs().max()) <= WEIGHT_TOLERANCE, name


@pytest.mark.thorough
@pytest.mark.parametrize("microbatch_size", [None, 1, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_that_of_one_machine(
    swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch, kind: str, microbatch_size: int | None
) -> None:
    strategy = attached(swarm, monkeypatch, microbatch_size=microbatch_size)
    runs = []
    for base, chosen in ((plain_base(swarm), "auto"), (strategy.base_model(), strategy)):
        torch.manual_seed(1)
        runs.append(tune(KINDS[kind](base), chosen, steps=STEPS if microbatch_size is None else 10))
    assert_equal(runs[1], runs[0])
    servers = [host.server for host in swarm.hosts.values() if host.server is not None]
    assert all(server.tuning.kept_bytes == 0 for server in servers), "a graph outlived its backward"


def test_graphs_of_clients_that_are_gone_are_dropped(swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lora(attached(swarm, monkeypatch).base_model())
    ids = next(iter(data()))[0]
    model(input_ids=ids, labels=ids, use_cache=False)  # a forward without a backward
    servers = [host.server for host in swarm.hosts.values() if host.server is not None]
    assert sum(server.tuning.kept_bytes for server in servers) > 0
    swarm.network.kill(PeerId("client"))
    swarm.sleep(1.5 * servers[0].tuning._limits.session_idle)
    assert sum(server.tuning.kept_bytes for server in servers) == 0


def test_what_raises_no_version_is_noticed(swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused optimizer and a hook that writes into `data` raise no tensor's version; servers get the new values."""

    class Fused(Tuning):
        @override
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-2, fused=True)

        @override
        def on_train_batch_end(self, *_: Any) -> None:
            for one in self.parameters():
                if one.requires_grad:
                    one.data.clamp_(-0.2, 0.2)

    strategy = attached(swarm, monkeypatch)
    runs = []
    for base, chosen in ((plain_base(swarm), "auto"), (strategy.base_model(), strategy)):
        torch.manual_seed(1)
        runs.append(tune(lora(base), chosen, steps=10, kind=Fused, gradient_clip_val=None))
    assert_equal(runs[1], runs[0])


def test_places_of_served_weights_take_no_memory(swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = attached(swarm, monkeypatch)
    tune(lora(strategy.base_model()), strategy, steps=1)
    places = set(map(id, strategy._client.placeholders))
    held = [one for one in strategy.base_model().parameters() if id(one) in places]
    assert len(held) >= 4 * 9
    assert all(one.untyped_storage().nbytes() == one.itemsize for one in held)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("victim", ["b", "c"])
def test_no_death_of_a_server_changes_a_gradient(
    swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """The server is killed between a forward and its backward, and its graph is lost."""
    killed: list[str] = []
    backward, num = Chain._backward, 0

    async def kills(self: Chain, peer: Any, **rest: Any) -> Any:
        nonlocal num
        num += peer == victim
        if num == 5 and not killed:
            killed.append(peer)
            swarm.network.kill(PeerId(victim))
        return await backward(self, peer, **rest)

    monkeypatch.setattr(Chain, "_backward", kills)
    strategy = attached(swarm, monkeypatch)
    runs = []
    for base, chosen in ((plain_base(swarm), "auto"), (strategy.base_model(), strategy)):
        torch.manual_seed(1)
        runs.append(tune(lora(base), chosen, steps=10))
    assert killed == [victim], "the fault is due"
    assert_equal(runs[1], runs[0])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_death_of_a_server_that_holds_a_result_changes_no_gradient(
    swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    """The server is killed between its call and the neighbouring stage's, whose server cannot fetch the result."""
    killed: list[str] = []
    call, stage_of_victim = getattr(Chain, f"_{direction}"), 0 if direction == "forward" else 1
    victim = next(name for name in "bc" if stage_of_victim in swarm.hosts[name].span)

    async def kills(self: Chain, peer: Any, *, stage: int, returns: bool) -> Any:
        if stage != stage_of_victim and self.peers.get(stage_of_victim) == victim and not killed:
            killed.append(victim)
            swarm.network.kill(PeerId(victim))
        return await call(self, peer, stage=stage, returns=returns)

    strategy = attached(swarm, monkeypatch)
    servers = [host.server for name, host in swarm.hosts.items() if name != victim and host.server is not None]
    monkeypatch.setattr(Chain, f"_{direction}", kills)
    runs = []
    for base, chosen in ((plain_base(swarm), "auto"), (strategy.base_model(), strategy)):
        torch.manual_seed(1)
        runs.append(tune(lora(base), chosen, steps=6))
    assert killed == [victim], "the fault is due"
    assert_equal(runs[1], runs[0])
    assert all(server.tuning.kept_bytes == 0 for server in servers), "a result outlived its step"


def test_hidden_states_go_from_server_to_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the client sends and receives does not grow with the number of stages, apart from small messages."""
    make_model("llama").save_pretrained(tmp_path)
    received = []
    for num_stages in (2, 4):
        with closing(ServedSwarm(tmp_path, num_stages=num_stages)) as swarm:
            swarm.serve("a")
            for name in "bc":
                swarm.serve(name, join="a", share=0.5, has_files=False)
            strategy = attached(swarm, monkeypatch)
            torch.manual_seed(1)
            tune(lora(strategy.base_model()), strategy, steps=4)
            traffic = swarm.client._models.transport.traffic.received_bytes
            received.append(sum(number for (_, method), number in traffic.items() if method == TUNE_FORWARD.name))
            fetched = [host._transport.traffic.received_bytes for host in swarm.hosts.values()]
            assert any(method == TUNE_FETCH.name for one in fetched for _, method in one)
    assert received[1] < 1.5 * received[0]


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("broken", ["forward", "backward"])
def test_a_server_that_fails_is_replaced(swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """A failure of one machine is not the model's. If all servers fail, their error is raised."""
    strategy = attached(swarm, monkeypatch)
    failed: list[str] = []

    def break_down(name: str) -> None:
        server = swarm.hosts[name].server
        assert server is not None
        compute = server.tuning._compute

        async def fails(client: PeerId, stage: int, work: Any) -> Any:
            if f"TuningHandlers._{broken}." not in work.__qualname__:
                return await compute(client, stage, work)
            failed.append(name)
            raise StageError("the machine is broken")

        monkeypatch.setattr(server.tuning, "_compute", fails)

    break_down("b")
    runs = []
    for base, chosen in ((plain_base(swarm), "auto"), (strategy.base_model(), strategy)):
        torch.manual_seed(1)
        runs.append(tune(lora(base), chosen, steps=6))
    assert "b" in failed, "the fault is due"
    assert_equal(runs[1], runs[0])
    for name in "ac":
        break_down(name)
    with pytest.raises(StageError, match="the machine is broken"):
        tune(runs[1].model, strategy, steps=1, accelerator="auto")


@pytest.mark.thorough
def test_users_in_turns_disturb_nobody(swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three users with their own adapters and data train in turns, step by step, over the same stages."""

    def steps(model: Any, seed: int) -> Iterator[float]:
        torch.manual_seed(seed)
        adapted = lora(model)
        optimizer = torch.optim.AdamW([one for one in adapted.parameters() if one.requires_grad], lr=1e-2)
        for (ids,) in list(data(seed)) * 3:
            loss = adapted(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    users = [attached(swarm, monkeypatch, f"user-{seed}") for seed in range(3)]
    together = list(zip(*(steps(one.base_model(), seed) for seed, one in enumerate(users)), strict=True))
    for seed in range(3):
        assert [losses[seed] for losses in together] == pytest.approx(
            list(steps(plain_base(swarm), seed)), rel=LOSS_TOLERANCE
        )


def test_little_room_for_adapters_and_graphs_costs_only_time(
    swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = attached(swarm, monkeypatch)
    servers = [host.server for host in swarm.hosts.values() if host.server is not None]
    for server in servers:
        server.tuning._limits = replace(server.tuning._limits, cache_bytes=1)
        server.tuning.adapters._max_bytes = 3000
    runs = []
    for base, chosen in ((plain_base(swarm), "auto"), (strategy.base_model(), strategy)):
        torch.manual_seed(1)
        runs.append(tune(lora(base, target_modules=["q_proj"]), chosen, steps=6))
    assert_equal(runs[1], runs[0])
    assert all(server.tuning.adapters.num_bytes <= 3000 for server in servers)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_files_are_ordinary_ones(swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Write a folder that plain peft loads, and a checkpoint of Lightning from which both resume."""
    strategy = attached(swarm, monkeypatch)
    files = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    torch.manual_seed(1)
    saved = ModelCheckpoint(tmp_path / "files", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    tuned = tune(lora(strategy.base_model()), strategy, steps=8, callbacks=[saved], **files)
    tuned.model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="save an adapter by peft"):
        strategy.base_model().save_pretrained(tmp_path / "base of zeros")
    loaded = peft.PeftModel.from_pretrained(plain_base(swarm), tmp_path / "adapter")
    ids = next(iter(data()))[0]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, tuned.model(ids).logits, rtol=1e-12, atol=1e-12)

    state = torch.load(tmp_path / "files" / "step=4.ckpt", weights_only=True)["state_dict"]
    assert any("lora_A" in name for name in state)
    assert not any("base_layer" in name or "mlp.up_proj.weight" in name for name in state)
    plain = Tuning(lora(plain_base(swarm)))
    assert not plain.load_state_dict(state, strict=False).unexpected_keys
    again = {"accelerator": "auto", "callbacks": [ModelCheckpoint(tmp_path / "files", every_n_train_steps=4)]}
    # The accelerator belongs to the strategy by now, as with each of Lightning's.
    resumed = tune(tuned.model, strategy, steps=8, **files, **again, ckpt_path=tmp_path / "files" / "step=4.ckpt")
    assert resumed.losses == pytest.approx(tuned.losses[8:], rel=LOSS_TOLERANCE)


def test_a_forward_that_may_train_leaves_no_cache_to_go_on_with(
    swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = attached(swarm, monkeypatch)
    torch.manual_seed(1)
    model, plain = lora(strategy.base_model(), init_lora_weights=False).eval(), None
    torch.manual_seed(1)
    plain = lora(plain_base(swarm), init_lora_weights=False).eval()
    ids = torch.tensor([[3, 5, 2, 7]])
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": False}
    assert torch.equal(model.generate(input_ids=ids, **options), plain.generate(input_ids=ids, **options))
    with torch.no_grad():
        begun = model(ids, use_cache=True).past_key_values
    with pytest.raises(ConfigError, match=r"Generate text under `torch\.no_grad"), torch.no_grad():
        model(torch.tensor([[4]]), past_key_values=begun)
    with model.disable_adapter(), torch.no_grad():
        filled = model(ids, use_cache=True).past_key_values
    with pytest.raises(ConfigError, match="the same adapter from beginning to end"), torch.no_grad():
        model(torch.tensor([[4]]), past_key_values=filled)
    with model.disable_adapter():
        without = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(without, plain_base(swarm).generate(input_ids=ids, max_new_tokens=6, do_sample=False))
    with pytest.raises(ConfigError, match="a forward hook"), torch.no_grad():
        model(ids, adapter_names=["__base__"], use_cache=False)


def _initialised(model: Any, by: str) -> Any:
    """Set another initialization method's name afterwards: methods that read the weights do not support float64."""
    model.peft_config["default"].init_lora_weights = by
    return model


REFUSED = {
    "DoRA": (lambda model: lora(model, use_dora=True), "DoRA or another variant"),
    "IA3": (
        lambda model: peft.get_peft_model(
            model, peft.IA3Config(task_type="CAUSAL_LM", target_modules=["v_proj"], feedforward_modules=[])
        ),
        "got IA3",
    ),
    "prefix tuning": (
        lambda model: peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        "got PREFIX_TUNING",
    ),
    "a layer in a block": (lambda model: lora(model, modules_to_save=["up_proj"]), "only LoRA's A and B"),
    "a bias": (lambda model: lora(model, lora_bias=True, target_modules=["q_proj"]), "lora_bias"),
    "weights that are elsewhere": (lambda model: _initialised(lora(model), "olora"), "servers; got 'olora'"),
    "another model": (lambda model: nn.Linear(2, 2), "must hold the served model"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_tuned_is_refused(swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    strategy = attached(swarm, monkeypatch)
    make, message = REFUSED[kind]
    asked: list[int] = []
    monkeypatch.setattr(Chain, "forward", lambda *_: asked.append(1))
    with pytest.raises(ConfigError, match=message):
        tune(make(strategy.base_model()), strategy, steps=1)
    assert not asked


@pytest.mark.parametrize(
    ("options", "message"),
    [({"devices": 2}, "tuned by one process"), ({"precision": "bf16-true"}, "must fit the served model")],
)
def test_wrong_options_are_refused(
    swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    strategy = attached(swarm, monkeypatch)
    with pytest.raises(ConfigError, match=message):
        tune(lora(strategy.base_model()), strategy, steps=1, **options)


def keyed(model: Any, num_stages: int) -> None:
    """Seed the blocks of a plain model as servers do: by call and stage."""
    layers = model.base_model.model.model.layers
    of_stage = len(layers) // num_stages
    calls, draws = 0, dict[int, int]()

    def wrap(layer: nn.Module, place: int) -> None:
        forward = layer.forward
        stage, is_first = place // of_stage, place % of_stage == 0

        def drawn(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += place == 0
            seed = seed_of((torch.initial_seed(), calls, 0), stage)
            with KeyedRandom(seed, first_draw=0 if is_first else draws[stage]) as mode:
                output = forward(*args, **kwargs)
            draws[stage] = mode.draw
            return output

        layer.forward = drawn  # type: ignore[method-assign]

    for place, layer in enumerate(layers):
        wrap(layer, place)


@pytest.mark.thorough
def test_dropout_is_that_of_a_keyed_reference(swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is peft on one machine, whose blocks draw with the same keys."""
    strategy = attached(swarm, monkeypatch, microbatch_size=6)
    runs = []
    for base, chosen in ((plain_base(swarm), "auto"), (strategy.base_model(), strategy)):
        torch.manual_seed(1)
        model = lora(base, lora_dropout=0.5)
        if chosen == "auto":
            keyed(model, num_stages=2)
        runs.append(tune(model, chosen, steps=20))
    assert_equal(runs[1], runs[0])


@pytest.mark.thorough
def test_dropout_is_that_of_the_call_wherever_it_is_computed(
    swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout draws depend on the call alone: a server without cached graphs and a replacement draw the same masks."""
    losses = []
    for kills in (False, True):
        strategy = attached(swarm, monkeypatch, f"client-{kills}")
        torch.manual_seed(1)
        model = lora(strategy.base_model(), lora_dropout=0.5)
        if kills:
            for server in (host.server for host in swarm.hosts.values() if host.server is not None):
                server.tuning._limits = replace(server.tuning._limits, cache_bytes=1)
        losses.append(tune(model, strategy, steps=6).losses)
    assert losses[0] == pytest.approx(losses[1], rel=LOSS_TOLERANCE)
