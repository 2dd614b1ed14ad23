"""The digits classifier, on a swarm in this process and on none."""

import sys

import pytest

from examples.digits import train
from lightning_swarm.testing import InMemoryStrategy


def accuracy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> float:
    """Return the accuracy that the script prints at its end."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--max-epochs", "3", *arguments])
    train.main()
    said, _, number = capsys.readouterr().out.splitlines()[-1].rpartition(": ")
    assert said == "accuracy on images that it was not trained on"
    return float(number)


@pytest.mark.thorough
def test_a_swarm_learns_as_well_as_the_plain_trainer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[InMemoryStrategy] = []

    def strategy(num_stages: int) -> InMemoryStrategy:
        made.append(InMemoryStrategy(num_stages=num_stages))
        return made[-1]

    monkeypatch.setattr(train, "SwarmStrategy", strategy)
    swarm = accuracy(monkeypatch, capsys)
    [used] = made
    assert len(used.servers) == 3
    assert all(server.calls.num_forwards > 0 for server in used.servers)
    assert swarm > 0.9
    # Rounding may change the class of one of 359 images.
    assert swarm == pytest.approx(accuracy(monkeypatch, capsys, "--plain"), abs=0.004)
    assert len(made) == 1
