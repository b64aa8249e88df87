"""What an agent reports at the end of its episode: rewards and an answer, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from operators.gateway.errors import ApiError, invalid

_ID_PREFIXES = ("chatcmpl-", "resp_")
MAX_REWARD = 1e38
"""Batches have rewards in single precision."""
MAX_TEXT_BYTES = 1_000_000
"""Of an answer or an error, as UTF-8: a trajectory has them, beside its tokens, in one record of a topic."""
_SHOWN = 3
"""Ids that an error names."""


@dataclass(frozen=True, slots=True)
class AgentReport:
    """`reward` is that of the episode, None without one; `rewards` are those of conversations, by the id of a turn in
    each. `answer` is the text for verifiers, None for that of the response. With an `error` the episode fails."""

    reward: float | None = None
    answer: str | None = None
    error: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)


NO_REPORT = AgentReport()


def parse_report(body: Any) -> AgentReport:
    """The report in the body of a request. Raises ApiError."""
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    reward = None if body.get("reward") is None else _number(body["reward"], "reward")
    rewards = {} if body.get("rewards") is None else body["rewards"]
    if not isinstance(rewards, dict):
        raise invalid(f"rewards must be an object: a number for each id of a response, not {_cut(rewards)}", "rewards")
    own = {_turn_of(name): _number(each, f"the reward of {_cut(name)}", "rewards") for name, each in rewards.items()}
    return AgentReport(reward, text_in(body, "answer"), text_in(body, "error"), own)


def unknown_ids(turn_ids: list[str]) -> ApiError:
    """The error of a report with rewards for `turn_ids`, which are no turns of its episode."""
    shown = ", ".join(_cut(each) for each in turn_ids[:_SHOWN])
    more = f" and {len(turn_ids) - _SHOWN} more" if len(turn_ids) > _SHOWN else ""
    reason = f"rewards: no response of this episode has the id {shown}{more}; use the `id` of a response"
    return invalid(reason, "rewards")


def text_in(body: Mapping[str, Any], name: str) -> str | None:
    """The text `name` in `body`, None without it. Raises ApiError."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid(f"{name} must be text", name)
    size = 0 if value is None else len(value.encode(errors="surrogatepass"))
    if size > MAX_TEXT_BYTES:
        raise invalid(f"{name} has {size} bytes as UTF-8, more than {MAX_TEXT_BYTES}: shorten it", name)
    return value


def _turn_of(response_id: str) -> str:
    """The turn with `response_id`, the id that an API returned for its response."""
    for prefix in _ID_PREFIXES:
        if response_id.startswith(prefix):
            return response_id.removeprefix(prefix)
    return response_id


def _number(value: Any, what: str, param: str = "reward") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_REWARD:
        raise invalid(f"{what} must be a finite number, at most {MAX_REWARD:g}, not {_cut(value)}", param)
    return float(value)


def _cut(value: Any) -> str:
    return str(value)[:80]
