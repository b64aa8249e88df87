"""W3C trace context. Trace ids are a function of run and prompt, so they need not be propagated."""

from __future__ import annotations

import hashlib

TRACEPARENT = "traceparent"


def trace_id(run: str, group: str) -> str:
    """The trace id, 32 hex digits, of a prompt and its samples, by the id of their group."""
    return hashlib.blake2b(f"{run}/{group}".encode(), digest_size=16).hexdigest()


def traceparent(run: str, group: str, record: str) -> bytes:
    """The header value of one record of that trace; `record` identifies it within the trace (class and id)."""
    span = hashlib.blake2b(f"{run}/{group}/{record}".encode(), digest_size=8).hexdigest()
    return f"00-{trace_id(run, group)}-{span}-01".encode()
