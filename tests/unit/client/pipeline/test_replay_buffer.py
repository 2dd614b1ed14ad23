"""A trainer keeps the inputs of the open step, in memory and then on disk, until the step is decided."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_swarm.client.pipeline.replay_buffer import Microbatch, ReplayBuffer, ReplayCopy
from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import CallKey
from tests.unit.conftest import needs_full_disk, on_a_full_disk
from tests.unit.swarm import MODE, key, rows

ROUTE = [PeerId("a"), PeerId("b")]
NUM_BYTES = 2 * rows(0).nbytes


def copy(name: CallKey, *inputs: Any, extras: dict[str, Any] | None = None, gradients: Any = None) -> ReplayCopy:
    microbatch = Microbatch(
        key=name, num_rows=2, inputs=inputs or (rows(1),), extras=[extras or {}, {}], modes=[MODE, MODE], weight=0.5
    )
    return ReplayCopy(microbatch=microbatch, gradients=[rows(2)] if gradients is None else gradients, route=ROUTE)


@pytest.fixture(params=[0, 1 << 20], ids=["on disk", "in memory"])
def copies(request: pytest.FixtureRequest) -> Iterator[ReplayBuffer]:
    made = ReplayBuffer(request.param)
    yield made
    made.close()


TENSORS = [
    torch.tensor(3.0),
    torch.zeros(0, 4),
    torch.arange(24).reshape(2, 3, 4).transpose(0, 2),
    torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)[:, 1],
    torch.tensor([True, False]),
    torch.tensor([1 + 2j, 3 - 4j]).conj(),
    torch.full((2, 2), float("nan")),
]


def test_a_copy_comes_back_as_it_was(loop: VirtualLoop, copies: ReplayBuffer) -> None:
    kept = copy(
        key(), (TENSORS[0], [TENSORS[1], None]), TENSORS[2], extras={"y": TENSORS[3], "flag": True, "name": "x"},
        gradients=[TENSORS[4], None, TENSORS[5], TENSORS[6]],
    )  # fmt: skip
    loop.run_until_complete(copies.keep(kept))
    found = loop.run_until_complete(copies.find(key()))
    assert found is not None
    torch.testing.assert_close(found.microbatch.inputs, kept.microbatch.inputs, rtol=0, atol=0)
    assert found.microbatch.extras[0].keys() == {"y", "flag", "name"}
    assert torch.equal(found.microbatch.extras[0]["y"], TENSORS[3])
    assert (found.microbatch.extras[0]["flag"], found.microbatch.extras[0]["name"]) == (True, "x")
    assert found.gradients[1] is None
    for ours, theirs in zip(found.gradients, kept.gradients, strict=True):
        if ours is not None and theirs is not None:
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert (found.microbatch.key, found.microbatch.weight, list(found.route)) == (key(), 0.5, ROUTE)


def test_what_does_not_fit_goes_to_disk(loop: VirtualLoop) -> None:
    copies = ReplayBuffer(3 * NUM_BYTES)
    for index in range(5):
        loop.run_until_complete(copies.keep(copy(key(0, index), rows(index))))
    assert copies.used_bytes == 3 * NUM_BYTES
    assert copies.num_spilled == 2
    assert len(copies) == 5
    for index in range(5):
        found = loop.run_until_complete(copies.find(key(0, index)))
        assert found is not None
        assert torch.equal(found.microbatch.inputs[0], rows(index))
    copies.close()


def test_a_record_releases_its_step_and_those_before_it(loop: VirtualLoop, copies: ReplayBuffer) -> None:
    for step in range(4):
        loop.run_until_complete(copies.keep(copy(key(step=step), rows(step))))
    loop.run_until_complete(copies.release(2))
    assert [key(step=step) in copies for step in range(4)] == [False, False, False, True]
    found = loop.run_until_complete(copies.find(key(step=3)))
    assert found is not None
    assert torch.equal(found.microbatch.inputs[0], rows(3))
    loop.run_until_complete(copies.clear())
    assert len(copies) == copies.used_bytes == 0
    assert loop.run_until_complete(copies.find(key(step=3))) is None


def test_the_file_does_not_grow_from_step_to_step(loop: VirtualLoop) -> None:
    copies, sizes = ReplayBuffer(0), []
    for step in range(5):
        loop.run_until_complete(copies.keep(copy(key(step=step))))
        assert copies._file._file is not None
        sizes.append(copies._file._file.seek(0, 2))
        loop.run_until_complete(copies.release(step))
        assert copies._file._file.seek(0, 2) == 0
    assert sizes == [NUM_BYTES] * 5
    copies.close()


def test_the_newer_copy_of_a_microbatch_counts(loop: VirtualLoop, copies: ReplayBuffer) -> None:
    for seed in (1, 2):
        loop.run_until_complete(copies.keep(copy(key(), rows(seed))))
    assert len(copies) == 1
    found = loop.run_until_complete(copies.find(key()))
    assert found is not None
    assert torch.equal(found.microbatch.inputs[0], rows(2))
    assert copies.used_bytes in (0, NUM_BYTES)


def test_nothing_is_on_disk_while_all_fits(loop: VirtualLoop) -> None:
    copies = ReplayBuffer(1 << 20)
    loop.run_until_complete(copies.keep(copy(key())))
    assert copies._file._file is None
    copies.close()


@needs_full_disk
def test_a_full_disk_costs_the_copies_and_says_so(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copies = ReplayBuffer(NUM_BYTES)
    loop.run_until_complete(copies.keep(copy(key())))
    with monkeypatch.context() as full:
        full.setattr(tempfile, "TemporaryFile", on_a_full_disk)
        loop.run_until_complete(copies.keep(copy(key(index=1))))
    assert "Copies of microbatches cannot be written to" in caplog.text
    assert key(index=1) not in copies
    loop.run_until_complete(copies.keep(copy(key(index=2))))
    for index in (0, 2):
        assert loop.run_until_complete(copies.find(key(index=index))) is not None
    copies.close()
