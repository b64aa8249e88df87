"""W3C trace context: which records belong together. Ids are a function of run and prompt, so nobody hands them on."""

from __future__ import annotations

import hashlib

TRACEPARENT = "traceparent"


def trace_id(run: str, group: str) -> str:
    """The 32 hex digits of the trace of a prompt, by the id of its group, and of its samples."""
    return hashlib.blake2b(f"{run}/{group}".encode(), digest_size=16).hexdigest()


def traceparent(run: str, group: str, what: str) -> bytes:
    """The header's value for a record of that trace; `what` tells the record from the others: its kind and identity."""
    span = hashlib.blake2b(f"{run}/{group}/{what}".encode(), digest_size=8).hexdigest()
    return f"00-{trace_id(run, group)}-{span}-01".encode()
