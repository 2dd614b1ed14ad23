"""Tickets: a ticket is a future by name, for tensors that a peer holds or will hold, and that others fetch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import DeadlineExceeded, ProtocolError, SwarmError, TicketGone
from lightning_swarm.network import SMALL_BYTES, Message, PeerId, Transport
from lightning_swarm.protocol.messages.calls import Ticket, TicketName
from lightning_swarm.protocol.messages.wire import Count, Seconds, WireMessage, decode, encode

WAIT_METHOD = "ticket.wait"
FETCH_METHOD = "ticket.fetch"

_HOLD_S = 10.0  # a long poll is answered "pending" after this, so that a dead consumer is not served for ever
_MAX_UNPROMISED = 10_000
_REPLY_MARGIN_S = 5.0  # if an answer is later than this, the consumer asks again


class WaitRequest(WireMessage, frozen=True):
    """A consumer asks a producer to answer when the named tensors exist, or after `hold_s` seconds."""

    name: TicketName
    hold_s: Seconds
    take_bytes: Count | None = None  # send the tensors along if they have no more bytes; None: do not send them


class WaitReply(WireMessage, frozen=True):
    """A producer tells a consumer whether the tensors exist."""

    ready: bool
    report: bytes = b""  # the producer's own message about them
    taken: bytes | None = None  # the body that belongs to the tensors with this reply; None: there are none


class FetchRequest(WireMessage, frozen=True):
    """A consumer asks a producer for the named tensors, which exist."""

    name: TicketName


@dataclass
class _Entry:
    promised: bool = False
    message: Message | None = None
    error: SwarmError | None = None
    report: bytes = b""
    once: bool = False  # forget the tensors after one fetch
    gone: bool = False  # the tensors are forgotten, the report stays
    waiting: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that are there, and of their body."""
        return 0 if self.message is None else self.message.num_tensor_bytes + len(self.message.body)


# A producer promises a name and fulfils it later. A consumer waits by a small long poll that holds no stream. Small
# tensors come with the answer, others are fetched then. A consumer may ask before the promise: calls of one microbatch
# are sent to all stages at once.
class TicketStore:
    """Holds this peer's tensors for other peers, and waits for theirs."""

    def __init__(self, transport: Transport, *, max_bytes: int) -> None:
        self._transport = transport
        self._max_bytes = max_bytes
        self._entries: dict[str, _Entry] = {}
        transport.handle_stream(WAIT_METHOD, self._handle_wait, max_bytes=0)
        transport.handle_stream(FETCH_METHOD, self._handle_fetch, max_bytes=0)

    # ------------------------------------------------------------------ the producer's side

    def promise(self, name: str) -> bool:
        """Promise that `name` will exist. Return False if it was promised before and has not failed or gone."""
        entry = self._entries.setdefault(name, _Entry())
        if entry.error is not None or entry.gone:  # the call was sent again, so neither is final
            entry = self._entries[name] = _Entry()
        if entry.promised:
            return False
        entry.promised = True
        return True

    def fulfil(self, name: str, message: Message, report: bytes = b"", *, once: bool = False) -> None:
        """Provide the promised tensors, which must not change any more. With `once`, forget them after one fetch."""
        entry = self._entries.get(name)
        if entry is None or entry.done.is_set():  # a name that was dropped meanwhile stays dropped
            return
        entry.promised, entry.message, entry.report, entry.once = True, message, report, once
        entry.done.set()

    def offer(self, name: str, message: Message) -> None:
        """Promise and fulfil at once."""
        self.promise(name)
        self.fulfil(name, message)

    def fail(self, name: str, error: SwarmError) -> None:
        """Break a promise: every consumer that waits gets the error."""
        entry = self._entries.get(name)
        if entry is None or entry.done.is_set():
            return
        entry.error = error
        entry.done.set()

    def withdraw(self, name: str) -> None:
        """Take a promise back as if it had never been given. Consumers go on waiting, for the next one."""
        entry = self._entries.get(name)
        if entry is None:
            return
        entry.promised = False
        if entry.done.is_set() or entry.waiting == 0:
            del self._entries[name]

    def drop(self, prefix: str) -> None:
        """Forget all names that begin with `prefix`."""
        for name in [name for name in self._entries if name.startswith(prefix)]:
            entry = self._entries.pop(name)
            if not entry.done.is_set():
                entry.error = TicketGone(f"{name} was released")
                entry.done.set()

    # ------------------------------------------------------------------ the consumer's side

    async def wait(self, ticket: Ticket, *, timeout: float) -> bytes:
        """Wait until the tensors exist, or existed, and return the producer's report; raise what they failed with."""
        if ticket.peer_id == self._transport.peer_id:
            return (await self._ready(ticket.name, timeout)).report
        return (await self._wait(ticket, None, timeout))[0].report

    async def _wait(self, ticket: Ticket, take_bytes: int | None, timeout: float) -> tuple[WaitReply, Message]:
        """Wait for another peer's tensors, and return its reply, with the tensors if they are small enough."""
        deadline = now_s() + timeout
        while (left_s := deadline - now_s()) > 0:
            hold_s = min(left_s, _HOLD_S)
            request = Message(encode(WaitRequest(name=ticket.name, hold_s=hold_s, take_bytes=take_bytes)))
            held_s = now_s() + hold_s
            try:
                answer = await self._transport.stream(
                    ticket.peer_id,
                    WAIT_METHOD,
                    request,
                    timeout=hold_s + _REPLY_MARGIN_S,
                    max_bytes=take_bytes or 0,
                )
            except DeadlineExceeded:
                if now_s() < held_s + _REPLY_MARGIN_S:
                    raise  # the tensors failed with this error
                # A dead peer would have ended the call with another error, so a message was lost.
                continue
            reply = decode(answer.body, WaitReply)
            if reply.ready:
                return reply, Message(reply.taken or b"", answer.tensors)
            await asyncio.sleep(held_s - now_s())  # a producer that answers too early must not be asked without pause
        raise DeadlineExceeded(f"{ticket.name} did not appear at {ticket.peer_id} within {timeout:g} s")

    async def fetch(self, ticket: Ticket, *, timeout: float) -> Message:
        """Wait for the tensors and fetch them; raise what `wait` raises. This peer's own tensors are not copied."""
        return (await self.fetch_reported(ticket, timeout=timeout))[0]

    async def fetch_reported(self, ticket: Ticket, *, timeout: float) -> tuple[Message, bytes]:
        """Fetch the tensors with the producer's report; see `fetch` and `wait`."""
        if ticket.peer_id == self._transport.peer_id:
            entry = await self._ready(ticket.name, timeout)
            return self._take(ticket.name, entry), entry.report
        reply, message = await self._wait(ticket, min(SMALL_BYTES, self._max_bytes), timeout)
        if reply.taken is None:
            request = Message(encode(FetchRequest(name=ticket.name)))
            message = await self._transport.stream(
                ticket.peer_id, FETCH_METHOD, request, timeout=timeout, max_bytes=self._max_bytes
            )
        return message, reply.report

    # ------------------------------------------------------------------ answering

    async def _handle_wait(self, caller: PeerId, message: Message) -> Message:
        request = decode(message.body, WaitRequest)
        try:
            entry = await self._done(request.name, min(request.hold_s, _HOLD_S))
        except DeadlineExceeded:
            return Message(encode(WaitReply(ready=False)))
        if entry.error is not None:  # raised out here, for it may be a `DeadlineExceeded`, too
            raise entry.error
        if request.take_bytes is None or entry.num_bytes > min(request.take_bytes, SMALL_BYTES):
            return Message(encode(WaitReply(ready=True, report=entry.report)))
        taken = self._take(request.name, entry)
        return Message(encode(WaitReply(ready=True, report=entry.report, taken=taken.body)), taken.tensors)

    async def _handle_fetch(self, caller: PeerId, message: Message) -> Message:
        name = decode(message.body, FetchRequest).name
        entry = self._entries.get(name)
        if entry is None or not entry.done.is_set():
            raise TicketGone(f"{name} is not there (wait for it first)")
        return self._take(name, entry)

    def _take(self, name: str, entry: _Entry) -> Message:
        if entry.error is not None:
            raise entry.error
        if entry.gone:
            raise TicketGone(f"{name} was dropped to save memory")
        assert entry.message is not None
        message = entry.message
        if entry.once:  # the report stays; who fetches again gets `TicketGone`, and can call again
            entry.message, entry.gone = None, True
        return message

    async def _ready(self, name: str, timeout: float) -> _Entry:
        entry = await self._done(name, timeout)
        if entry.error is not None:
            raise entry.error
        return entry

    async def _done(self, name: str, timeout: float) -> _Entry:
        """Wait until the tensors exist or have failed."""
        entry = self._entries.get(name)
        if entry is None:
            if sum(not entry.promised for entry in self._entries.values()) >= _MAX_UNPROMISED:
                raise ProtocolError(f"more than {_MAX_UNPROMISED} names that nobody promised are asked for")
            entry = self._entries[name] = _Entry()
        entry.waiting += 1
        try:
            async with asyncio.timeout(timeout):
                await entry.done.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{name} did not appear within {timeout:g} s") from None
        finally:
            entry.waiting -= 1
            if not entry.promised and entry.waiting == 0 and self._entries.get(name) is entry:
                del self._entries[name]
        return entry
