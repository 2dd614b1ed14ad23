"""Tickets: named futures with which peers fetch tensors that another peer holds or will hold."""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy, DeadlineExceeded, SwarmError, TicketGone
from lightning_swarm.network import SMALL_BYTES, Message, PeerId, Transport
from lightning_swarm.protocol.messages.calls import FetchRequest, Ticket, TicketKey, WaitReply, WaitRequest
from lightning_swarm.protocol.rpc import FETCH, WAIT, WithTensors

_HOLD_S = 10.0  # seconds after which a long poll is answered even without tensors, so that dead consumers' polls end
_MAX_UNPROMISED = 4096  # most unpromised names that one peer may wait for: as many as it may have open calls
_MAX_UNPROMISED_IN_ALL = 32_768  # most unpromised names that all peers together may wait for
_REPLY_MARGIN_S = 5.0  # seconds after the hold time when the consumer repeats an unanswered poll

Readers = Callable[[PeerId, bytes | None], bool]
"""``(caller, presented key) -> whether the caller may read``, called at each access."""


def with_key(key: TicketKey) -> Readers:
    """Return `Readers` that admit all peers that present `key`."""
    return lambda _, presented: presented is not None and hmac.compare_digest(presented, key)


@dataclass
class _Entry:
    readers: Readers | None = None  # None: not promised
    asked_by: PeerId | None = None  # the first peer that asked before the promise; the entry counts toward its limit
    message: Message | Callable[[], Message] | None = None  # None: not fulfilled, or forgotten
    error: SwarmError | None = None
    report: bytes = b""  # the producer's message about the tensors
    once: bool = False  # forget the tensors after one fetch
    gone: bool = False  # the tensors are forgotten, the report stays
    waiting: int = 0  # number of consumers that wait
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors and their body; 0 until they exist."""
        return self.message.num_tensor_bytes + len(self.message.body) if isinstance(self.message, Message) else 0


# A producer promises a name and fulfils it later. A consumer waits by a small long poll that holds no stream. Small
# tensors come with the answer; larger tensors are fetched afterwards. A consumer may ask before the promise, because
# calls of one microbatch are sent to all stages at once.
class TicketStore:
    """Holds this peer's tensors for other peers, and waits for theirs."""

    def __init__(self, transport: Transport, *, max_bytes: int) -> None:
        self._transport = transport
        self._max_bytes = max_bytes
        self._entries: dict[str, _Entry] = {}
        self._unpromised = Counter[PeerId]()  # peer -> unpromised names that it asked for first
        self._num_unpromised = 0  # unpromised names, over all peers
        WAIT.serve(transport, self._handle_wait)
        FETCH.serve(transport, self._handle_fetch)

    # ------------------------------------------------------------------ the producer's side

    def promise(self, name: str, readers: Readers) -> bool:
        """Promise `name` to its `readers`. Return False if it is promised already, and neither failed nor forgotten."""
        entry = self._entries.setdefault(name, _Entry())
        if entry.error is not None or entry.gone:  # the consumer repeats its call
            entry = self._entries[name] = _Entry()
        if entry.readers is not None:
            return False
        self._stop_counting(entry)
        entry.readers = readers
        return True

    def fulfil(
        self, name: str, message: Message | Callable[[], Message], report: bytes = b"", *, once: bool = False
    ) -> None:
        """Provide the promised tensors, which must not change any more. With `once`, forget them after one fetch."""
        # `message` may be a function that makes the tensors at the first fetch. No answer to `WAIT` includes these.
        entry = self._entries.get(name)
        if entry is None or entry.readers is None or entry.done.is_set():  # a dropped name stays dropped
            return
        entry.message, entry.report, entry.once = message, report, once
        entry.done.set()

    def offer(self, name: str, message: Message | Callable[[], Message], readers: Readers) -> None:
        """Promise and fulfil at once."""
        self.promise(name, readers)
        self.fulfil(name, message)

    def fail(self, name: str, error: SwarmError) -> None:
        """Fail a promise: every waiting consumer gets the error."""
        entry = self._entries.get(name)
        if entry is None or entry.readers is None or entry.done.is_set():
            return
        entry.error = error
        entry.done.set()

    def withdraw(self, name: str) -> None:
        """Withdraw a promise as if it had never been made. Waiting consumers wait for the next promise of the name."""
        entry = self._entries.get(name)
        if entry is None:
            return
        entry.readers = None
        if entry.done.is_set() or entry.waiting == 0:
            del self._entries[name]

    def drop(self, prefix: str) -> None:
        """Forget all names that begin with `prefix`."""
        for name in [name for name in self._entries if name.startswith(prefix)]:
            entry = self._entries.pop(name)
            self._stop_counting(entry)
            if not entry.done.is_set():
                entry.error = TicketGone(f"{name} was released")
                entry.done.set()

    # ------------------------------------------------------------------ the consumer's side

    async def wait(self, ticket: Ticket, *, timeout: float) -> bytes:
        """Wait until the promise is fulfilled, and return the producer's report; raise its error if it failed."""
        if ticket.peer_id == self._transport.peer_id:
            return (await self._own_entry(ticket.name, timeout)).report
        return (await self._wait(ticket, None, timeout))[0].report

    async def _wait(self, ticket: Ticket, take_bytes: int | None, timeout: float) -> tuple[WaitReply, Message]:
        """Wait for another peer's tensors; return its reply, and the tensors if they have at most `take_bytes`."""
        deadline_s, max_bytes = now_s() + timeout, take_bytes or 0
        while (left_s := deadline_s - now_s()) > 0:
            hold_s = min(left_s, _HOLD_S)
            request = WaitRequest(name=ticket.name, ticket_key=ticket.key, hold_s=hold_s, take_bytes=take_bytes)
            held_until_s = now_s() + hold_s
            try:
                reply, tensors = await WAIT.ask(
                    self._transport, ticket.peer_id, request, timeout=hold_s + _REPLY_MARGIN_S, max_bytes=max_bytes
                )
            except DeadlineExceeded:
                if now_s() < held_until_s + _REPLY_MARGIN_S:
                    raise  # too early for this call's timeout: the tensors failed with this error
                # A dead peer would have ended the call with another error, so a message was lost.
                continue
            if reply.ready:
                return reply, Message(reply.taken or b"", tensors)
            await asyncio.sleep(held_until_s - now_s())  # do not poll in a loop if the producer answers too early
        raise DeadlineExceeded(f"{ticket.name} did not appear at {ticket.peer_id} within {timeout:g} s")

    async def fetch(self, ticket: Ticket, *, timeout: float) -> Message:
        """Wait for the tensors and fetch them; raises the errors of `wait`. This peer's own tensors are not copied."""
        return (await self.fetch_reported(ticket, timeout=timeout))[0]

    async def fetch_reported(self, ticket: Ticket, *, timeout: float) -> tuple[Message, bytes]:
        """Fetch the tensors with the producer's report; see `fetch` and `wait`."""
        if ticket.peer_id == self._transport.peer_id:
            entry = await self._own_entry(ticket.name, timeout)
            return self._take(ticket.name, entry), entry.report
        reply, message = await self._wait(ticket, min(SMALL_BYTES, self._max_bytes), timeout)
        if reply.taken is None:
            request = FetchRequest(name=ticket.name, ticket_key=ticket.key)
            body, tensors = await FETCH.ask(
                self._transport, ticket.peer_id, request, timeout=timeout, max_bytes=self._max_bytes
            )
            message = Message(body, tensors)
        return message, reply.report

    # ------------------------------------------------------------------ answering

    async def _handle_wait(self, caller: PeerId, request: WaitRequest) -> WithTensors[WaitReply]:
        """Answer a consumer's poll when the tensors exist, or its hold time is over."""
        try:
            entry = await self._finished_entry(request.name, min(request.hold_s, _HOLD_S), caller, request.ticket_key)
        except DeadlineExceeded:
            return WaitReply(ready=False), ()
        if entry.error is not None:  # raised outside the `try`, because it may also be a `DeadlineExceeded`
            raise entry.error
        is_deferred = entry.message is not None and not isinstance(entry.message, Message)
        if request.take_bytes is None or is_deferred or entry.num_bytes > min(request.take_bytes, SMALL_BYTES):
            return WaitReply(ready=True, report=entry.report), ()
        taken = self._take(request.name, entry)
        return WaitReply(ready=True, report=entry.report, taken=taken.body), taken.tensors

    async def _handle_fetch(self, caller: PeerId, request: FetchRequest) -> Message:
        entry = self._entries.get(request.name)
        if entry is None or not entry.done.is_set():
            raise TicketGone(
                f"tensors must exist before they are fetched, and {request.name} does not. Wait for it first."
            )
        self._check_reads(entry, request.name, caller, request.ticket_key)
        return self._take(request.name, entry)

    def _take(self, name: str, entry: _Entry) -> Message:
        """Return the tensors of a fulfilled promise; forget them if they are meant for a single fetch."""
        if entry.error is not None:
            raise entry.error
        if entry.gone:
            raise TicketGone(f"{name} was dropped to save memory")
        assert entry.message is not None
        if not isinstance(entry.message, Message):
            entry.message = entry.message()
        message = entry.message
        if entry.once:  # the report stays; a second fetch raises `TicketGone`, and the consumer can repeat the call
            entry.message, entry.gone = None, True
        return message

    async def _own_entry(self, name: str, timeout: float) -> _Entry:
        """Wait until this peer's own promise is fulfilled; raise its error if it failed."""
        entry = await self._finished_entry(name, timeout, self._transport.peer_id, None)
        if entry.error is not None:
            raise entry.error
        return entry

    async def _finished_entry(self, name: str, timeout: float, caller: PeerId, key: bytes | None) -> _Entry:
        """Wait until a promise is fulfilled or has failed; refuse callers that may not read it."""
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = self._add_unpromised(caller)
        self._check_reads(entry, name, caller, key)
        if entry.done.is_set():
            return entry
        entry.waiting += 1
        try:
            async with asyncio.timeout(timeout):
                await entry.done.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{name} did not appear within {timeout:g} s") from None
        finally:
            entry.waiting -= 1
            # Forget a name that was never promised once no consumer waits for it.
            if entry.readers is None and entry.waiting == 0 and self._entries.get(name) is entry:
                self._stop_counting(self._entries.pop(name))
        self._check_reads(entry, name, caller, key)
        return entry

    def _add_unpromised(self, caller: PeerId) -> _Entry:
        """Create the entry of an unpromised name; it counts toward the limit of the peer that asks for it."""
        if self._unpromised[caller] >= _MAX_UNPROMISED or self._num_unpromised >= _MAX_UNPROMISED_IN_ALL:
            raise Busy(
                f"a peer may wait for {_MAX_UNPROMISED} names that are not promised yet, and all peers for "
                f"{_MAX_UNPROMISED_IN_ALL}; {caller} waits for {self._unpromised[caller]}, and all peers for "
                f"{self._num_unpromised}. Ask again later."
            )
        self._unpromised[caller] += 1
        self._num_unpromised += 1
        return _Entry(asked_by=caller)

    def _stop_counting(self, entry: _Entry) -> None:
        """Stop counting a promised or forgotten name toward the limit of the peer that asked for it first."""
        if entry.asked_by is not None:
            self._num_unpromised -= 1
            self._unpromised[entry.asked_by] -= 1
            if not self._unpromised[entry.asked_by]:
                del self._unpromised[entry.asked_by]
            entry.asked_by = None

    def _check_reads(self, entry: _Entry, name: str, caller: PeerId, key: bytes | None) -> None:
        """Refuse a caller that may not read the promised tensors. Before the promise, no caller is refused."""
        if entry.readers is not None and caller != self._transport.peer_id and not entry.readers(caller, key):
            raise TicketGone(f"{name} is not for {caller}: it is held for others, or for those that show its key")
