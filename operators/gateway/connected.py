"""Work for a request that ends once its client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled once the client of `request`, whose body has been read, has gone.

    A turn continues at its owner: a repetition of the request gets its response. Raises ClientDisconnect.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for each in (working, gone):
            each.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)
