"""Errors of requests, in the shape of OpenAI's API."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that gets an error with HTTP `status`; `kind`, `code` and `param` are as in OpenAI's API."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.param = status, kind, code, param

    def body(self) -> dict[str, Any]:
        """The body of the response."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error of a request that can never succeed."""
    return ApiError(400, message, code=code, param=param)
