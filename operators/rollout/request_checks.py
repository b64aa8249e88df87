"""Validation of requests and of weight loads, the same for every engine."""

from __future__ import annotations

import math

import numpy as np

from operators.rollout.engine import EngineStatus, Request
from schemas.records import PolicyVersion, Sampling


def check_request(request: Request, vocabulary: int, context: int) -> None:
    """Raise ValueError, naming the trajectory, if an engine of this vocabulary and context cannot run `request`.

    A partial response that has already finished (limit reached, or last token is a stop token) is accepted: it
    completes without a step.
    """
    try:
        _check_tokens("prompt", request.prompt, vocabulary)
        if len(request.prompt) == 0:
            raise ValueError("the prompt is empty")
        if len(request.prompt) >= context:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens leaves no room in a context of {context}")
        _check_sampling(request.sampling, vocabulary)
        if request.partial is not None:
            _check_tokens("partial response", request.partial.token_ids, vocabulary)
            if len(request.partial.logprobs) != len(request.partial.token_ids):
                tokens, logprobs = len(request.partial.token_ids), len(request.partial.logprobs)
                raise ValueError(f"the partial response has {tokens} tokens but {logprobs} logprobs")
            if len(request.prompt) + len(request.partial.token_ids) > context:
                raise ValueError(f"prompt and partial response are longer than the context of {context}")
    except ValueError as error:
        raise ValueError(f"trajectory {request.trajectory_id!r}: {error}") from error


def check_loadable(status: EngineStatus, version: PolicyVersion) -> None:
    """Raise RuntimeError if an engine with load `status` must not load other weights."""
    if status.running or status.waiting:
        raise RuntimeError(
            f"cannot load version {version} while {status.running} requests run and {status.waiting} wait: "
            "a trajectory has one weight version"
        )


def _check_tokens(what: str, token_ids: np.ndarray, vocabulary: int) -> None:
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        raise ValueError(f"the {what} must be a 1-D array of integers, not {token_ids.dtype}{list(token_ids.shape)}")
    # As unsigned numbers negative ones are the largest, so one pass finds both.
    if len(token_ids) and token_ids.view(f"u{token_ids.itemsize}").max() >= vocabulary:
        unknown = token_ids[(token_ids < 0) | (token_ids >= vocabulary)][0]
        raise ValueError(f"token {unknown} of the {what} is not in the vocabulary of {vocabulary}")


def _check_sampling(sampling: Sampling, vocabulary: int) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise ValueError(f"temperature must be a finite number ≥ 0, not {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], not {sampling.top_p}")
    if sampling.top_k < 0:
        raise ValueError(f"top_k must be ≥ 0, not {sampling.top_k}")
    if sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be ≥ 1, not {sampling.max_new_tokens}")
    for token_id in sampling.stop_token_ids:
        if not 0 <= token_id < vocabulary:
            raise ValueError(f"stop token {token_id} is not in the vocabulary of {vocabulary}")
    if "" in sampling.stop_strings:
        raise ValueError("a stop string is empty")
