"""Parts of the wide-area benchmarks: a swarm that relays, and the layers' costs by the paper's figures."""

from __future__ import annotations

from collections import Counter

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.wan import relay
from benchmarks.wan.utilisation import PAPER, ROUND_TRIPS_S, derive
from lightning_swarm.client.pipeline import call_factory
from lightning_swarm.client.pipeline.microbatch_run import MicrobatchRun
from lightning_swarm.network import PeerId
from lightning_swarm.testing import local_swarm

WIDTH = 64


class _Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out: Tensor = self.blocks(batch)
        return out.square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _trained(monkeypatch: pytest.MonkeyPatch, *, relays: bool) -> tuple[list[Tensor], Counter[frozenset[PeerId]]]:
    """Return the final weights, and the bytes between each two peers."""
    monkeypatch.setattr(call_factory, "MicrobatchRun", MicrobatchRun)  # restored at the end
    relay.install().on = relays
    moved: Counter[frozenset[PeerId]] = Counter()
    with local_swarm(4, num_stages=3, role="trainer", microbatch_size=16) as swarm:
        trainer = swarm.trainer(max_epochs=1, precision="64-true")
        net = _Net()
        data = torch.randn(256, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        trainer.fit(net, DataLoader(data, batch_size=64))  # type: ignore[arg-type]
        for peer in swarm.strategies[0].peers:
            for (other, _), num_bytes in peer.transport.traffic.sent_bytes.items():
                moved[frozenset({peer.transport.peer_id, other})] += num_bytes
    return [parameter.detach().clone() for parameter in net.parameters()], moved


def test_a_swarm_that_relays_computes_the_same_and_its_servers_send_each_other_no_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (straight, direct), (relayed, through) = (_trained(monkeypatch, relays=relays) for relays in (False, True))
    torch.testing.assert_close(relayed, straight, rtol=1e-12, atol=1e-12)
    tensors = 256 * WIDTH * 8  # bytes of an epoch, over one boundary and one way
    assert _between_servers(direct) > 4 * tensors
    assert _between_servers(through) < tensors
    assert sum(through.values()) > sum(direct.values()) + 4 * tensors - _between_servers(through)


def _between_servers(moved: Counter[frozenset[PeerId]]) -> int:
    return sum(num_bytes for pair, num_bytes in moved.items() if PeerId("peer-0") not in pair)


@pytest.mark.parametrize("name", PAPER)
def test_a_layer_that_is_derived_from_the_papers_figures_gives_them_back(name: str) -> None:
    layer = derive(PAPER[name])
    for trip_s, percent in zip(ROUND_TRIPS_S, PAPER[name], strict=True):
        again = 100.0 * layer.compute_s / (layer.compute_s + layer.transfer_s + trip_s)
        assert again == pytest.approx(percent, rel=0.03)


def test_bytes_of_a_tensor_are_what_half_of_a_transfer_carries() -> None:
    layer = derive([100.0 / (1.0 + (0.032 + trip_s) / 0.016) for trip_s in ROUND_TRIPS_S])
    assert layer.compute_s == pytest.approx(0.016)
    assert layer.num_bytes == pytest.approx(1_000_000)
