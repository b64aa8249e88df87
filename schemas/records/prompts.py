"""Prompts and sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.array_fields import TokenIds
from schemas.identity import Purpose, group_id
from schemas.records.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. Temperature 0 is greedy; top_k 0 and top_p 1 are off.

    A response ends with one of `stop_token_ids`, or with the token that completes one of `stop_strings` in its text.
    """

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question and its number of samples. Written by prompts and evaluation, read by placement.

    `messages` is the conversation that the chat template made `text` from, with the system message and the question in
    its template; empty without a chat template. `reference` is JSON for the verifier of `task` (the dataset's entry).
    `policy_version` pins an evaluation to one version. `round` names its evaluation round, or the origin of an imported
    prompt ("" for training). `environment` names the environment that responds to the model's turns ("": a single turn
    without environment).
    """

    number: int
    purpose: Purpose
    task: str
    text: str
    token_ids: TokenIds
    reference: str
    samples: int
    sampling: Sampling
    policy_version: PolicyVersion | None = None
    round: str = ""
    environment: str = ""
    messages: tuple[Message, ...] = ()

    @property
    def prompt_id(self) -> str:
        return group_id(self.purpose, self.number)
