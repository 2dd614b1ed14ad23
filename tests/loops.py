"""The state of a lead's loop in its transferred form, for tests that need no loop."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from lightning_swarm.protocol.messages.batches import NEEDED, TravellingLoop


def travelling(**changes: Any) -> dict[str, Any]:
    """Return a value of `plain_values`, as a standby keeps it."""
    checkpoint = {**dict.fromkeys(NEEDED), "epoch": 1, "loops": {"fit_loop": {"state_dict": {}}}}
    loop = TravellingLoop(
        checkpoint=checkpoint,
        parameter_names=["weight"],
        made={},
        first={},
        now={"torch": torch.arange(5)},
        num_batches=None,
        metrics={},
        results={},
        shown={},
        logging={},
        followed={},
        logs={},
        added={},
        num_counted=1,
        heard=[],
        position=(0, 1),
    )
    return {**msgspec.structs.asdict(loop), **changes}
