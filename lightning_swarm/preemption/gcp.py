"""Google Compute Engine: preemptible and spot machines are told 30 seconds before."""

from __future__ import annotations

from typing import Final

from typing_extensions import override

from lightning_swarm.preemption.cloud import Cloud
from lightning_swarm.preemption.http import Answer, NoAnswer

_PATH: Final = "/computeMetadata/v1/instance/preempted"
_FLAVOR: Final = {"Metadata-Flavor": "Google"}


class GCP(Cloud):
    """The metadata server's ``instance/preempted``.

    Source: Google Cloud, "Create and use Spot VMs", section "Handle preemption".
    """

    name = "gcp"

    @override
    async def is_here(self) -> bool:
        await self._ask()
        return True

    @override
    async def notice(self) -> str | None:
        answer = await self._ask()
        said = answer.text.strip()
        if said not in ("TRUE", "FALSE"):
            raise NoAnswer(f"GCP answers {_PATH} with TRUE or FALSE, got {said[:100]!r}")
        return "GCP preempts this machine within 30 s" if said == "TRUE" else None

    async def _ask(self) -> Answer:
        answer = await self.endpoint.ask("GET", _PATH, _FLAVOR)
        # Others answer at this address, too, but not with this header.
        if answer.status != 200 or answer.headers.get("metadata-flavor") != _FLAVOR["Metadata-Flavor"]:
            raise NoAnswer(f"GCP answered {_PATH} with status {answer.status}")
        return answer
