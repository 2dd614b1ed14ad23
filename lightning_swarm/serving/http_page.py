"""The page at the endpoint's root, on which people try its models."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path


@functools.cache
def page() -> tuple[str, Mapping[str, str]]:
    """Return the page and its headers, which permit only its own script and style, and requests to this endpoint."""
    text = Path(__file__).with_name("chat.html").read_text(encoding="utf-8")
    digests = {element: _digest(text, element) for element in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src '{digests['script']}'; style-src '{digests['style']}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return text, headers


def _digest(text: str, element: str) -> str:
    (content,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
