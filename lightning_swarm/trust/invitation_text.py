"""Invitations as lines of text, and errors that explain why a line cannot be used."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any, Final, NoReturn, TypeAlias

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.trust.certificates import Certificate, SecretInvitation, decode, encode

_KIND: Final = "swarm-invite-"
_PREFIX: Final = f"{_KIND}1."
_CHECKSUM_BYTES: Final = 6
MAX_TEXT_BYTES: Final = 4096

AnyInvitation: TypeAlias = SecretInvitation | Certificate  # a certificate is for one peer, and not secret


def is_invitation(text: str) -> bool:
    """Return whether a text begins like an invitation."""
    return text.strip().startswith(_KIND)


def check_is_file_name(text: str) -> None:
    """Raise `ConfigError` if a file name is an invitation's text itself. The error does not repeat the text."""
    if is_invitation(text):
        raise ConfigError(
            "`invite` must be the name of a file with an invitation, got an invitation itself, which must stay "
            "secret, while other people read scripts. Write it to a file, and pass the file's name."
        )


def to_text(invitation: AnyInvitation) -> str:
    """Write an invitation as one line."""
    return _line(encode(invitation))


def from_text(text: str, source: str) -> AnyInvitation:
    """Read an invitation, or raise a `ConfigError` that names the `source` and the fault, but never the text."""
    line = text.strip()
    if not is_invitation(line):
        refuse(source, f"it does not begin with {_KIND!r}", "Name the file that `lightning-swarm invite` wrote")
    if not line.startswith(_PREFIX):
        version = re.match(r"\d*", line.removeprefix(_KIND))
        number = version[0][:9] if version is not None and version[0] else "none"
        problem = f"its version is {number}, and this program reads version 1"
        refuse(source, problem, "Use the same version of lightning-swarm as the run's owner")
    data = _payload(line)
    if data is None:
        refuse(source, "it was cut or changed on its way: its checksum is wrong", "Copy the whole line again")
    kinds: Any = AnyInvitation  # `type[...]` stands for one class in mypy, not for a union
    remedy = "Ask the run's owner for another one"
    try:
        invitation: AnyInvitation = decode(data, kinds)
    except ValueError as error:
        refuse(source, f"it is whole, but malformed ({error})", remedy)
    if not invitation.is_genuine:
        refuse(source, "it is whole, but forged: its owner did not sign it", remedy)
    return invitation


def refuse(source: str, why: str, remedy: str) -> NoReturn:
    """Raise the error about an invitation that cannot be used."""
    shown = "its text" if source.startswith("/dev/fd/") else repr(source)
    raise ConfigError(f"`invite` must be a file with an invitation, got {shown}: {why}. {remedy}.")


def _payload(line: str) -> bytes | None:
    """Return the payload of a line of this version; None if it was cut or changed."""
    text = line.removeprefix(_PREFIX)
    try:
        payload = base64.b64decode((text + "=" * (-len(text) % 4)).encode(), altchars=b"-_", validate=True)
    except ValueError:
        return None
    data = payload[:-_CHECKSUM_BYTES]
    return data if _line(data) == line else None  # also refuses text that is not in canonical base64


def _line(data: bytes) -> str:
    checksum = hashlib.sha256(_PREFIX.encode() + data).digest()[:_CHECKSUM_BYTES]
    return _PREFIX + base64.urlsafe_b64encode(data + checksum).decode().rstrip("=")
