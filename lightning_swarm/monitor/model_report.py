"""The servers of a served model and their memory: an object for programs, and lines for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.core.readable import printable, short_name, size_text, table_lines
from lightning_swarm.network.addresses import Address, most_reachable
from lightning_swarm.protocol.messages.serving import ModelServers, ServerOffer

_MAX_TERMS: Final = 6  # servers whose memory is listed one by one


@dataclass(frozen=True, kw_only=True)
class ObservedServer:
    """One server of a served model, as it has announced itself."""

    peer_id: str
    place: str  # host and port
    stages: tuple[int, ...]
    weight_bytes: int
    free_text_bytes: int  # memory for further texts
    num_texts: int
    tokens_per_s: float  # over the last seconds, mean of its stages
    stage_ms: float  # mean milliseconds that one stage takes for a token; 0: not measured
    has_files: bool  # sends the model's files to other peers
    is_leaving: bool
    problem: ClassVar[None] = None  # as of a run's peers; dead servers are not listed once their announcements expire


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """A served model at one moment."""

    model: str  # the id of its card
    kind: str  # as in config.json, such as ``llama``
    weights: str  # dtype or kind of quantisation
    stage_bytes: tuple[int, ...]
    servers: tuple[ObservedServer, ...]

    @property
    def peers(self) -> tuple[ObservedServer, ...]:
        """The servers, under the same name as a run's peers."""
        return self.servers

    @property
    def name(self) -> str:
        """The model's kind, the beginning of its id, and its weights."""
        return f"{self.kind} {self.model[:12]}, {self.weights}"

    @property
    def num_texts(self) -> int:
        """Open texts; each has a session at a server of each stage."""
        stages = range(len(self.stage_bytes))
        return max(sum(server.num_texts for server in self.servers if stage in server.stages) for stage in stages)

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the model computes, of prompts and of new text; each passes one server of each stage."""
        return sum(server.tokens_per_s * len(server.stages) for server in self.servers) / len(self.stage_bytes)


def summarize_model(found: ModelServers) -> ModelReport:
    """Convert a server's answer into a report; `ProtocolError` if it names stages that the model does not have."""
    num_stages = len(found.stage_bytes)
    if any(offer.stages.stop > num_stages for offer in found.servers.values()):
        raise ProtocolError(f"servers of a model must serve some of its {num_stages} stages, got other stages")
    return ModelReport(
        model=printable(found.model),
        kind=printable(found.kind),
        weights=printable(found.weights),
        stage_bytes=tuple(found.stage_bytes),
        servers=tuple(
            _server(peer, offer, found.stage_bytes)
            for peer, offer in sorted(found.servers.items(), key=lambda item: (item[1].first_stage, item[0]))
        ),
    )


def _server(peer: str, offer: ServerOffer, sizes: Sequence[int]) -> ObservedServer:
    addresses = Address.parse_all(offer.addresses)
    return ObservedServer(
        peer_id=peer,
        place=printable(str(most_reachable(addresses).host_port)) if addresses else "an unknown place",
        stages=tuple(offer.stages),
        weight_bytes=sum(sizes[offer.first_stage : offer.stages.stop]),
        free_text_bytes=offer.free_bytes,
        num_texts=offer.num_sessions,
        tokens_per_s=offer.tokens_per_s,
        stage_ms=1000 * offer.step_s,
        has_files=offer.has_files,
        is_leaving=offer.is_draining,
    )


def model_table(report: ModelReport) -> str:
    """Format a report as a table with a line for each server, below a headline and the stages without a server."""
    stages = range(len(report.stage_bytes))
    held = [server.stages for server in report.servers if not server.is_leaving]
    counts = [sum(stage in served for served in held) for stage in stages]
    single = [stage for stage in stages if counts[stage] == 1]
    texts = f"{report.num_texts} text{'s' if report.num_texts != 1 else ''}, {report.tokens_per_s:.1f} tokens/s"
    lines = [f"model {report.name}: {texts}", coverage(report.stage_bytes, held)]
    if single and len(single) < len(stages):
        lines.append(f"No other server could continue the texts of {named_stages(single)}.")
    rows = [
        (
            _first_to_last(server.stages),
            short_name(server.peer_id),
            server.place,
            size_text(server.weight_bytes),
            size_text(server.free_text_bytes),
            str(server.num_texts),
            f"{server.tokens_per_s:.1f}",
            f"{server.stage_ms:.1f}" if server.stage_ms else "-",
            ", ".join(["leaving"] * server.is_leaving + ["has the files"] * server.has_files),
        )
        for server in report.servers
    ]
    columns = "stages", "server", "at", "weights", "free for texts", "texts", "tokens/s", "ms a stage", ""
    return "\n".join([*lines, "", *table_lines([columns, *rows])])


def _first_to_last(stages: Sequence[int]) -> str:
    return str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"


# ---------------------------------------------------------------------- sentences


def missing_stages(num_stages: int, held: Sequence[Sequence[int]]) -> list[int]:
    """Return the stages without a server. `held`: the stages of each server."""
    return [stage for stage in range(num_stages) if not any(stage in stages for stages in held)]


def coverage(sizes: Sequence[int], held: Sequence[Sequence[int]]) -> str:
    """Return a sentence about the memory that a model needs and has.

    Args:
        sizes: Bytes of each stage's weights.
        held: The stages of each server.
    """
    terms = [size_text(sum(sizes[stage] for stage in stages)) for stages in held]
    listed = " + ".join(terms) if len(terms) <= _MAX_TERMS else f"the weights of {sum(map(len, held))} stages"
    needs = f"The model needs {size_text(sum(sizes))} in {len(sizes)} stage{'s' if len(sizes) != 1 else ''}"
    has = f"its servers hold {listed}" if terms else "it has no server"
    missing = missing_stages(len(sizes), held)
    if not missing:
        return f"{needs}; {has}: each stage has a server."
    number = size_text(sum(sizes[stage] for stage in missing))
    verb = "has" if len(missing) == 1 else "have"
    return f"{needs}; {has}: {number} are missing, {named_stages(missing)} {verb} no server."


def named_stages(stages: Sequence[int]) -> str:
    """Return the names of ascending stages, such as ``stages 0 to 3, 7``."""
    groups: list[list[int]] = []
    for stage in stages:
        if groups and groups[-1][-1] == stage - 1:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    texts = [str(group[0]) if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in groups]
    return f"stage{'s' if len(stages) != 1 else ''} {', '.join(texts)}"


def changes(before: Mapping[str, range], now: Mapping[str, range]) -> list[str]:
    """Return a phrase for each server that joined, left or moved. Both arguments map a peer to its stages."""
    found = [f"{short_name(peer)} left" for peer in before.keys() - now.keys()]
    for peer, stages in now.items():
        if before.get(peer) != stages:
            found.append(f"{short_name(peer)} {'moved to' if peer in before else 'came with'} {named_stages(stages)}")
    return sorted(found)
