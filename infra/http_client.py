"""Requests over HTTP. They go to the address that is named alone: no redirect is followed, no proxy is used."""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Mapping
from http.client import HTTPResponse
from typing import Any


def post_json(
    url: str, key: str, body: Mapping[str, Any], timeout_s: float, authority_file: str | None = None
) -> HTTPResponse:
    """The response to `body`, sent to `url` with the bearer token `key`; the caller closes it.

    With `authority_file` the server's certificate must be of an authority in that file, instead of the system's.
    Raises ValueError if `url` is not of HTTP, urllib.error.HTTPError for a status other than 2xx (a redirect too),
    OSError and http.client.HTTPException.
    """
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    return open_url(url, timeout_s, json.dumps(body).encode(), headers, authority_file=authority_file)


def patch_json(
    url: str, key: str, body: Mapping[str, Any], timeout_s: float, authority_file: str | None = None
) -> HTTPResponse:
    """The response to the merge patch `body` (RFC 7386), otherwise as `post_json`."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/merge-patch+json"}
    return open_url(url, timeout_s, json.dumps(body).encode(), headers, "PATCH", authority_file)


def open_url(
    url: str,
    timeout_s: float,
    data: bytes | None = None,
    headers: Mapping[str, str] = {},
    method: str | None = None,
    authority_file: str | None = None,
) -> HTTPResponse:
    """The response to a request, by default GET without a key. Raises as `post_json`."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url} must begin with http:// or https://")
    opener = urllib.request.OpenerDirector()  # `build_opener` adds redirects, proxies of the environment, files and FTP
    handlers = [
        urllib.request.HTTPHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ]
    if url.startswith("https://"):
        handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=authority_file)))
    for handler in handlers:
        opener.add_handler(handler)
    response: HTTPResponse = opener.open(
        urllib.request.Request(url, data, dict(headers), method=method), timeout=timeout_s
    )
    return response
