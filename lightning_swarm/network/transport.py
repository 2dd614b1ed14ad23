"""`BaseTransport`, the common part of all transports: registered methods, deadlines, self-calls, counting, closing."""

from __future__ import annotations

import asyncio
import itertools
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import (
    AccessDenied,
    Busy,
    ConfigError,
    DeadlineExceeded,
    ProtocolError,
    SwarmError,
    Unreachable,
    Untrusted,
    from_wire,
    to_wire,
)
from lightning_swarm.core.tasks import running_task
from lightning_swarm.network import (
    MAX_STREAM_BYTES,
    SMALL_BYTES,
    Admit,
    CallHandler,
    LinkEstimates,
    Message,
    PeerId,
    StreamHandler,
    Traffic,
    Transport,
    framing,
)
from lightning_swarm.network.access import CERTIFY, OPEN_METHODS, PING, Ban, Credentials, Permit, Rpc
from lightning_swarm.network.admission import ByteBudget, StreamSlot
from lightning_swarm.network.certification import Certification
from lightning_swarm.network.exchanges import OpenAnswers, OpenExchanges
from lightning_swarm.network.framing import FixedHeader, Head, Kind
from lightning_swarm.network.gatekeeper import Gatekeeper, banned
from lightning_swarm.network.liveness import Exchange, Liveness
from lightning_swarm.network.repeats import RepeatedSend, RunningAnswers, repeated_id
from lightning_swarm.network.rpc import (
    Channel,
    Hold,
    Responder,
    ServedMethod,
    Tap,
    answer_to,
    ask,
    check_answer,
    reserve_nothing,
    serve,
)

_T = TypeVar("_T")

SILENCE_S: Final = 10.0
"""Seconds without a sign of life after which the exchanges with a peer are ended."""

_IDLE_TIMEOUT_S: Final = 60.0  # longer than callers keep idle streams, so that no request meets a closing stream

# Limits on unanswered requests that no `admit` has accepted, for all callers together and for each caller: any peer
# that knows this peer's address may send such requests.
_UNADMITTED_TOTAL_BYTES: Final = 512 << 20
_UNADMITTED_PEER_BYTES: Final = 64 << 20
_FREE_BYTES: Final = SMALL_BYTES  # requests up to this length are not counted: each stream bounds their number


class CutOff(asyncio.Event):
    """Set when no other peer can reach this peer any more, although its transport was not closed."""

    reason: str = ""  # text for the user; empty until the event is set


class BaseTransport(Transport):
    """A transport without the wire, which subclasses add by `_send_call` and `_send_stream`."""

    closed = False

    # The paths of a request; the calls in brackets are only for large messages.
    # - Out: `call`, `stream` -> `_ask_with_deadline` -> `_exchange_small` -> `_send_small` -> `_send_call`
    #   [`_exchange_large` -> `_send_large` -> `_send_stream` -> `_ask_over_channel`], or `_call_own_handler`.
    # - In: `_serve_call` [`_serve_channel`] -> `_handler_of`, which checks the caller.

    def __init__(self, peer_id: PeerId, *, silence_s: float, receive_bytes: int = MAX_STREAM_BYTES) -> None:
        self.peer_id = peer_id
        self.traffic = Traffic()
        self.links = LinkEstimates()
        self.cut_off = CutOff()
        self.on_refused = lambda _: None
        self.tap: Tap | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._call_handlers: dict[str, CallHandler] = {}
        # method -> handler, most tensor bytes of a request, check of callers
        self._stream_handlers: dict[str, tuple[StreamHandler, int, Admit | None]] = {}
        # Requests whose callers `admit` has accepted. Each caller may have half, which leaves room for other callers.
        self._budget = ByteBudget(receive_bytes, receive_bytes // 2)
        self._unadmitted_budget = ByteBudget(_UNADMITTED_TOTAL_BYTES, _UNADMITTED_PEER_BYTES)
        self._open_requests = OpenExchanges()
        self._open_answers = OpenAnswers()
        self._shared_answers = RunningAnswers()
        self._tasks: set[asyncio.Task[Any]] = set()  # tasks that `close` cancels
        self._exchange_ids = itertools.count(1)  # 0 answers a message whose id could not be read
        self._liveness = Liveness(silence_s, self._ping, self._spawn)
        self._gate: Gatekeeper | None = None  # None: all peers may call, and are called
        self._certification: Certification | None = None
        self.handle_call(PING, _answer_ping)
        self.handle_call(CERTIFY, self._answer_certify)

    def handle_call(self, method: str, handler: CallHandler) -> None:
        """See `Transport`."""
        _check_unregistered(method, self._call_handlers)
        self._call_handlers[method] = handler

    def handle_stream(
        self, method: str, handler: StreamHandler, *, max_bytes: int = MAX_STREAM_BYTES, admit: Admit | None = None
    ) -> None:
        """See `Transport`."""
        _check_unregistered(method, self._stream_handlers)
        self._stream_handlers[method] = (handler, max_bytes, admit)

    async def call(self, peer: PeerId, method: str, body: bytes, *, timeout: float) -> bytes:
        """See `Transport`."""
        return (
            await self._ask_with_deadline(self._exchange_small, peer, Kind.CALL, method, Message(body), 0, timeout)
        ).body

    def stream(
        self, peer: PeerId, method: str, message: Message, *, timeout: float, max_bytes: int = MAX_STREAM_BYTES
    ) -> Coroutine[Any, Any, Message]:
        """See `Transport`."""
        is_small = max_bytes <= SMALL_BYTES and message.num_tensor_bytes <= SMALL_BYTES
        send = self._exchange_small if is_small else self._exchange_large
        return self._ask_with_deadline(send, peer, Kind.STREAM, method, message, max_bytes, timeout)

    async def _exchange_large(
        self, exchange: Exchange, peer: PeerId, _kind: Kind, method: str, message: Message, max_bytes: int
    ) -> Message:
        """Exchange messages over a separate stream; repeat a request without tensors while no bytes move."""
        exchange.is_large = True
        send = partial(self._send_large, peer, method, message, max_bytes, next(self._exchange_ids))
        return await (send(0) if message.tensors else RepeatedSend(exchange, send, self._spawn).first_answer())

    async def _send_large(
        self, peer: PeerId, method: str, message: Message, max_bytes: int, first_id: int, num_repeats: int
    ) -> Message:
        """Send a request once over a separate stream, and measure the link; `num_repeats`: 0 for the first request."""
        began_s = now_s()
        answer = await self._send_stream(peer, method, message, max_bytes, repeated_id(first_id, num_repeats))
        self._liveness.note_alive(peer)
        self.links.add_sample(
            peer, sent_bytes=message.num_tensor_bytes, received_bytes=answer.num_tensor_bytes, took_s=now_s() - began_s
        )
        return answer

    async def _exchange_small(
        self, exchange: Exchange, peer: PeerId, kind: Kind, method: str, message: Message, max_bytes: int
    ) -> Message:
        """Exchange messages that are small enough for the stream of the calls."""
        send = partial(self._send_small, peer, kind, next(self._exchange_ids), method, message)
        head, data = await RepeatedSend(exchange, send, self._spawn).first_answer()
        head.check_size(max_bytes)
        return Message(head.body, framing.take_tensors(data, head))

    async def _send_small(
        self, peer: PeerId, kind: Kind, first_id: int, method: str, message: Message, num_repeats: int
    ) -> tuple[Head, bytes]:
        """Send a small request once; return the head and the bytes of its answer, or raise the answer's error."""
        exchange_id = repeated_id(first_id, num_repeats)
        request = b"".join(framing.encode(kind, exchange_id, method, message))
        self.traffic.sent_bytes[peer, method] += len(request)
        began_s = now_s()
        fixed, data = await self._send_call(peer, method, request)
        self._liveness.note_alive(peer)
        self.links.add_sample(peer, sent_bytes=len(request), received_bytes=len(data), took_s=now_s() - began_s)
        self.traffic.received_bytes[peer, method] += len(data)
        head = framing.decode(data, fixed)
        check_answer(head, exchange_id, method)
        if self.tap is not None:
            await self.tap.arrived(self.peer_id, peer, method, message.body, head.body)
        return head, data

    def set_credentials(self, credentials: Credentials | None, rpcs: Iterable[Rpc] = ()) -> None:
        """From now on, answer and ask only certified peers, as `rpcs` permit their roles; None: all peers."""
        self._gate = self._certification = self._open_answers.gate = None
        if credentials is not None:
            self._gate = Gatekeeper(
                self.peer_id,
                credentials,
                rpcs,
                on_certified=self._on_certified,
                on_cut_off=self._on_cut_off,
                on_banned=self._on_banned,
                on_refused=lambda number: self.on_refused(number),  # noqa: PLW0108 - may be set later
            )
            self._open_answers.gate = self._gate
            self._certification = Certification(self._gate, self.call, self._spawn)

    def permit_of(self, peer: PeerId) -> Permit | None:
        """See `Transport`."""
        return None if self._gate is None else self._gate.permit_of(peer)

    async def certify(self, peer: PeerId) -> Permit | None:
        """See `Transport`."""
        return None if self._certification is None else await self._certification.permit_of(peer)

    @property
    def num_refused(self) -> int:
        """See `Transport`."""
        return 0 if self._gate is None else self._gate.refusals.total

    @property
    def bans(self) -> list[bytes]:
        """See `Transport`."""
        return [] if self._gate is None else self._gate.bans

    def ban(self, signed: bytes) -> None:
        """See `Transport`."""
        if self._gate is None:
            raise AccessDenied(
                f"{self.peer_id} accepts any peer, so it cannot ban one: its `trust` is not 'invited'. Start the run "
                "again with `trust='invited'`."
            )
        self._gate.ban(signed)

    def _on_banned(self, ban: Ban) -> None:
        """End all waits for other peers with the reason, because no peer answers this one any more."""
        self.cut_off.reason = f"This peer {banned(ban)}. Ask the owner."
        self.cut_off.set()

    async def _answer_certify(self, caller: PeerId, body: bytes) -> bytes:
        """Answer `CERTIFY`: verify the caller's certificate, the `body`, and return this peer's own."""
        if self._gate is None:
            raise Untrusted(
                f"{self.peer_id} accepts any peer and has no certificate to show: its `trust` is not 'invited', as "
                f"that of {caller} is. Start both with the same `trust`, and with invitations of the same run."
            )
        try:
            self._gate.certify(caller, body)
        except AccessDenied as error:
            self._gate.refuse(caller, error)
        return self._gate.credentials.certificate

    def _on_certified(self, peer: PeerId) -> None:
        """React to a peer's verified certificate; subclasses override this."""

    def _on_cut_off(self, peer: PeerId) -> None:
        """End all exchanges, in both directions, with a peer whose certificate permits nothing any more."""
        self._open_answers.end(peer)
        self._open_requests.end(peer)

    async def ping(self, peer: PeerId) -> float:
        """See `Transport`."""
        if self._gate is not None:
            self._gate.check_not_cut_off(peer)
        began_s = now_s()
        patience_s = self._liveness.patience_s(peer)
        try:
            with suppress(Busy):  # a busy peer is alive
                await self.call(peer, PING, b"", timeout=patience_s)
        except DeadlineExceeded as error:
            raise Unreachable(f"{peer} gave no sign of life for {patience_s:g} s.") from error
        return now_s() - began_s

    async def _ping(self, peer: PeerId) -> None:
        """Ping a peer during an exchange. Any answer, even an error, is a sign of life."""
        request = b"".join(framing.encode(Kind.CALL, next(self._exchange_ids), PING, Message()))
        self.traffic.sent_bytes[peer, PING] += len(request)
        _, answer = await self._send_call(peer, PING, request)
        self.traffic.received_bytes[peer, PING] += len(answer)

    @abstractmethod
    async def _send_call(self, peer: PeerId, method: str, request: bytes) -> tuple[FixedHeader | None, bytes]:
        """Carry an encoded call to `peer` and its encoded answer back, or raise `Unreachable`."""
        # Return the answer's fixed header, too, if it was read on the way.

    @abstractmethod
    async def _send_stream(
        self, peer: PeerId, method: str, message: Message, max_bytes: int, exchange_id: int
    ) -> Message:
        """Carry a message with tensors to `peer` and the answer back, or raise `Unreachable`."""

    async def _serve_call(self, caller: PeerId, request: bytes, fixed: FixedHeader | None = None) -> bytes:
        """Return the encoded answer to an encoded call; `fixed` is the call's header, if it was read already."""
        method, reserved_bytes = "", 0
        try:
            if len(request) > _FREE_BYTES:
                reserved_bytes = self._reserve(caller, len(request))
            head = framing.decode(request, fixed)
            served = self._handler_of(caller, head, joins=True)
            head.check_size(served.max_bytes)
            method = head.method
            message = Message(head.body, framing.take_tensors(request, head))
            answer = b"".join(await answer_to(head, served, message, max_bytes=SMALL_BYTES))
        except SwarmError as error:
            answer = b"".join(framing.encode_error(framing.exchange_id_of(request), error))
        finally:
            if reserved_bytes:
                self._unadmitted_budget.release(caller, reserved_bytes)
        # `method` is set only if `_handler_of` has accepted the caller. Unless the method is open, it is certified.
        account = caller if method and method not in OPEN_METHODS else self._account_of(caller)
        self.traffic.received_bytes[account, method] += len(request)
        self.traffic.sent_bytes[account, method] += len(answer)
        return answer

    def _account_of(self, caller: PeerId) -> PeerId:
        """Return the peer to count bytes for. Strangers share one entry, because they can change their ids."""
        return caller if self._gate is None or self._gate.is_certified(caller) else PeerId("")

    def _reserve(self, caller: PeerId, num_bytes: int) -> int:
        """Reserve room for the bytes of a call, and return their number, or refuse the call as `Busy`."""
        if not self._unadmitted_budget.take(caller, num_bytes):
            raise Busy(
                f"too many unanswered bytes: at most {_UNADMITTED_PEER_BYTES} from one caller (here {caller}), and "
                f"{_UNADMITTED_TOTAL_BYTES} from all"
            )
        return num_bytes

    def _check_size(self, caller: PeerId, num_bytes: int) -> None:
        """Refuse a stranger's long message unread. Asks the current gate, because a stream may outlive a gate."""
        if self._gate is not None:
            self._gate.check_size(caller, num_bytes)

    def _handler_of(self, caller: PeerId, head: Head, *, joins: bool = False) -> ServedMethod:
        """Find the handler of a request and its limits; refuse an unknown method, or a caller that may not call it."""
        # With `joins`, a repeat shares the answer of the request that it repeats.
        guard = None
        if self._gate is not None and caller != self.peer_id:
            self._gate.check_on_arrival(caller, head.method)
            # The guard ends the answer if the caller loses its permit meanwhile. Open methods require no permit.
            guard = None if head.method in OPEN_METHODS else self._open_answers
        respond: Responder
        hold: Hold = reserve_nothing
        max_bytes = 0
        if head.kind is Kind.CALL and (on_call := self._call_handlers.get(head.method)):
            respond = partial(_answer_call, on_call, caller)
        elif head.kind is Kind.STREAM and (registered := self._stream_handlers.get(head.method)):
            on_stream, max_bytes, admit = registered
            if admit is not None:
                admit(caller)
            hold = (self._unadmitted_budget if admit is None else self._budget).hold_of(caller)
            respond = partial(on_stream, caller)
        else:
            raise ProtocolError(f"Peer {self.peer_id} has no {head.kind.name.lower()} method `{head.method}`.")
        if joins:
            respond = self._shared_answers.joining(caller, head, respond)
        if self.tap is not None:
            respond = self.tap.answer(caller, self.peer_id, head, respond)
        return ServedMethod(max_bytes, respond, hold, caller, guard)

    async def _call_own_handler(self, kind: Kind, method: str, message: Message, max_bytes: int) -> Message:
        """Run this peer's own handler, under the limits that hold for other callers."""
        head = _describe(kind, method, message)
        served = self._handler_of(self.peer_id, head)
        head.check_size(served.max_bytes)
        try:
            answer = await served.respond(message)
        except SwarmError:
            raise
        except Exception as error:  # raise the error that another peer would receive
            raise from_wire(*to_wire(error)) from error
        _describe(Kind.ANSWER, method, answer).check_size(max_bytes)
        return answer

    async def _ask_over_channel(
        self, channel: Channel, peer: PeerId, method: str, message: Message, max_bytes: int, exchange_id: int
    ) -> tuple[Message, bool]:
        """Send a message with tensors over a channel, as `ask` does; its bytes are counted, and are signs of life."""
        try:
            with self._liveness.moving(peer, channel):
                return await ask(channel, Kind.STREAM, exchange_id, method, message, max_bytes)
        finally:
            self._count_traffic(peer, method, channel)

    async def _serve_channel(self, channel: Channel, caller: PeerId, slot: StreamSlot | None = None) -> None:
        """Answer the messages with tensors that `caller` sends over a channel, and mark `slot` as busy meanwhile."""

        def find(head: Head) -> ServedMethod:
            if slot is not None:
                slot.begin()
            # Only requests without tensors are repeated.
            return self._handler_of(caller, head, joins=not head.payload_bytes)

        def count(method: str, channel: Channel) -> None:
            if slot is not None and slot.num_busy:  # else no valid request came, so `find` was not called
                slot.end()
            # Unknown method names share one entry, or strangers could fill the memory by making up names.
            known = method in self._call_handlers or method in self._stream_handlers
            self._count_traffic(self._account_of(caller), method if known else "", channel)

        reserve = self._unadmitted_budget.hold_of(caller)

        def hold(num_bytes: int) -> AbstractAsyncContextManager[None]:
            self._check_size(caller, num_bytes)
            return reserve(num_bytes)

        await serve(channel, find, count, idle_timeout=_IDLE_TIMEOUT_S, hold=hold)

    def _count_traffic(self, peer: PeerId, method: str, channel: Channel) -> None:
        sent_bytes, received_bytes = channel.take_counts()
        if sent_bytes:
            self.traffic.sent_bytes[peer, method] += sent_bytes
        if received_bytes:
            self.traffic.received_bytes[peer, method] += received_bytes

    async def _ask_with_deadline(
        self,
        send: Callable[[Exchange, PeerId, Kind, str, Message, int], Awaitable[Message]],
        peer: PeerId,
        kind: Kind,
        method: str,
        message: Message,
        max_bytes: int,
        timeout: float,
    ) -> Message:
        """Exchange messages by `send`; end it after `timeout` s, when the peer falls silent, or at this peer's end."""
        if self.closed:
            raise Unreachable(f"This peer has closed its transport, so `{method}` cannot reach {peer}.")
        self._loop = asyncio.get_running_loop()
        limit = asyncio.timeout(timeout)
        exchange = Exchange(limit)
        try:
            async with limit:
                self._open_requests[limit] = peer
                if peer == self.peer_id:
                    return await self._call_own_handler(kind, method, message, max_bytes)
                self._liveness.watch(peer, exchange)
                if self._certification is None:
                    return await send(exchange, peer, kind, method, message, max_bytes)
                send_once = partial(send, exchange, peer, kind, method, message, max_bytes)
                return await self._certification.ask(peer, method, send_once)
        except TimeoutError as error:
            if not limit.expired():  # another timeout, within the exchange
                raise
            if self.closed:
                raise Unreachable(f"The transport was closed during `{method}` to {peer}.") from None
            if self._gate is not None:
                self._gate.check_not_cut_off(peer)
            if exchange.silent_s is not None:
                raise Unreachable(
                    f"{peer} gave no sign of life for {exchange.silent_s:.3g} s during `{method}`."
                ) from error
            raise DeadlineExceeded(f"{peer} did not answer `{method}` within {timeout:g} s.") from error
        finally:
            self._liveness.forget(peer, exchange)
            self._open_requests.pop(limit, None)

    def _spawn(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Start a task that `close` ends."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @contextmanager
    def _ended_by_close(self) -> Iterator[None]:
        """Make `close` end the running task."""
        task = running_task()
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def _break_off(self) -> None:
        """End all exchanges, in both directions, and allow no new exchange."""
        self.closed = True
        self._liveness.close()
        for task in self._tasks:
            task.cancel()
        if self._loop is not None and not self._loop.is_closed():
            # A test may kill a peer while no loop runs, but only a running loop can move deadlines.
            self._loop.call_soon(self._open_requests.end)

    async def _wait_until_served(self) -> None:
        """Await the tasks that `_break_off` cancelled, except a handler that closes its own transport."""
        cancelled = self._tasks - {asyncio.current_task()}
        if cancelled:
            await asyncio.wait(cancelled)


async def _answer_call(handler: CallHandler, caller: PeerId, message: Message) -> Message:
    return Message(await handler(caller, message.body))


async def _answer_ping(_caller: PeerId, body: bytes) -> bytes:
    if body:
        raise ProtocolError(f"{PING} takes no arguments, got {len(body)} bytes")
    return b""


def _check_unregistered(method: str, handlers: Mapping[str, object]) -> None:
    if method in handlers:
        raise ConfigError(f"`{method}` has a handler already; a method is registered once. Choose another name.")


def _describe(kind: Kind, method: str, message: Message) -> Head:
    """Make the head that `message` would have on the wire."""
    framing.check_outgoing(method, message)
    return Head(kind, 0, method, message.body, (), message.num_tensor_bytes)
