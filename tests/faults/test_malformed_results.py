"""Malformed results or errors of a single server end no audited run, whichever peer receives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError, StageError
from lightning_swarm.network import Message
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.handlers import ComputeHandlers
from tests.faults.test_audited import Model, audited, data, honest_weights
from tests.faults.test_two_faced import FIRST, LAST, Around

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "a column less": lambda tensor: tensor[:, :-1],
    "a row more": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "another dtype": lambda tensor: tensor.to(torch.int64),
    "one number": lambda tensor: tensor.sum(),
}


def give(monkeypatch: pytest.MonkeyPatch, liar: str, direction: str, change: Callable[[Tensor], Tensor]) -> list[str]:
    """Make a server change its results, also in probes and evaluations; return the names of the changed results."""
    fulfil, given = TicketStore.fulfil, list[str]()

    def lying(self: TicketStore, name: str, message: Any, *rest: Any, **more: Any) -> None:
        if self._transport.peer_id == liar and f"/{direction}" in name:
            given.append(name)
            message = Message(
                message.body, tuple(change(tensor) if tensor.ndim else tensor for tensor in message.tensors)
            )
        fulfil(self, name, message, *rest, **more)

    monkeypatch.setattr(TicketStore, "fulfil", lying)
    return given


@pytest.mark.thorough
@pytest.mark.parametrize("form", [*FORMS])
@pytest.mark.parametrize(("liar", "direction"), [(FIRST, "forward"), (LAST, "forward"), (LAST, "backward")])
def test_a_result_of_another_form_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, liar: str, direction: str, form: str
) -> None:
    """The neighbours rightly refuse it, and so do all their replacements."""
    expected = honest_weights(6, num_stages=2)
    given = give(monkeypatch, liar, direction, FORMS[form])
    found, _ = audited(6, num_stages=2, share=0.0)
    assert given
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("form", [*FORMS])
@pytest.mark.thorough
def test_a_gradient_of_another_form_ends_no_run(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """The trainer's own layers precede the first stage."""
    expected = honest_weights(6, num_stages=2, model=Around, pipeline="net")
    given = give(monkeypatch, FIRST, "backward", FORMS[form])
    found, _ = audited(6, num_stages=2, model=Around(), share=0.0, pipeline="net")
    assert given
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("liar", [FIRST, LAST])
def test_false_probes_end_no_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, liar: str) -> None:
    """They make blocks seem to mix samples; the coordinator computes that itself."""
    expected = honest_weights(6, num_stages=2)
    fulfil, given = TicketStore.fulfil, list[str]()

    def lying(self: TicketStore, name: str, message: Any, *rest: Any, **more: Any) -> None:
        if self._transport.peer_id == liar and ".e" in name and "/forward" in name:
            given.append(name)
            message = Message(message.body, tuple((1 + len(given)) * tensor for tensor in message.tensors))
        fulfil(self, name, message, *rest, **more)

    monkeypatch.setattr(TicketStore, "fulfil", lying)
    found, _ = audited(6, num_stages=2, share=0.0)
    assert given
    assert "A server sent false results in the check for blocks that mix samples" in caplog.text
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


class Mixes(nn.Module):
    @override
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(dim=0)


class Fails(nn.Module):
    @override
    def forward(self, hidden: Tensor) -> Tensor:
        raise ValueError("this block fails")


def test_blocks_that_mix_samples_are_refused_as_ever() -> None:
    with pytest.raises(ConfigError, match="compute each sample of a batch by itself"):
        audited(4, num_stages=2, model=Model(block=Mixes), share=0.0)


class Validating(Model):
    """It also computes outside of steps."""

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return data()

    @override
    def validation_step(self, batch: list[Tensor]) -> None:
        self.net(batch[0])


@pytest.mark.thorough
def test_an_error_of_one_server_ends_no_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = honest_weights(6, num_stages=2, model=Validating)
    forward, refused = ComputeHandlers._forward, list[str]()

    async def failing(self: ComputeHandlers, name: str, stage: Any, request: Any, given: Any) -> None:
        if self._transport.peer_id == LAST and request.key.evaluation and not request.key.is_probe:
            refused.append(name)
            raise StageError("out of memory")
        await forward(self, name, stage, request, given)

    monkeypatch.setattr(ComputeHandlers, "_forward", failing)
    found, _ = audited(6, num_stages=2, model=Validating(), share=0.0)
    assert refused
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def test_an_error_of_the_blocks_ends_the_run_as_ever() -> None:
    """All servers raise it, from any inputs."""
    with pytest.raises(StageError, match="this block fails"):
        audited(4, num_stages=2, model=Model(block=Fails), share=0.0)
