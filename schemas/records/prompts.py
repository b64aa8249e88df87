"""Questions, and how to answer them."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.array_fields import TokenIds
from schemas.identity import Purpose, group_id
from schemas.records.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. Temperature 0 is greedy; top_k 0 and top_p 1 are off.

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
class Prompt:
    """A question and how often to answer it. Made by prompts and evaluation, eaten by placement.

    `reference` is JSON for the verifier of `task` (the dataset's entry). `policy_version` pins an evaluation to one
    version, `round` names the evaluation it belongs to, or where it stood before it was imported ("" for training).
    `environment` names the one that answers what the model writes ("": there is one turn, and nobody answers).
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

    @property
    def prompt_id(self) -> str:
        return group_id(self.purpose, self.number)
