"""Labels in the names of a Metric's values: `accuracy/mean{task="sums"}`, as Prometheus writes them.

A name is the same in every run; what a user names, such as a task, is a label. Release 0.2.0 wrote the task into the
name (`accuracy/mean/sums`); `split_labels` reads both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TASK = "task"
TEXT = "text"
FIRST_ERROR = "first_error"
"""The value 1, with the labels `task` and `text`: the first line of the task's first error, in the metric `score`."""
EXHAUSTED = "exhausted"
"""1 in the metric `prompts` when all questions are drawn: those of `prompts.epochs`."""
REFUSED = "refused/"
"""In the metric `prompts`: the prefix of how many rows of a kind were refused."""
DROPPED_SINCE_BATCH = "dropped_since_batch"
"""In the metric `experience`: the trajectories dropped since the last batch, with the newest reason as label `text`."""
UNFILLED_BATCHES = "unfilled_batches"
"""In the metric `experience`: how many batches those would have filled."""
LEFT_OUT = "buffer/left_out"
"""In the metric `experience`: trajectories of complete groups of which the sampler takes none into a batch."""
SHARD, SHARDS = "shard", "shards"
"""In the metrics of a role with several shards: the number of the one that reports, and of how many."""
LATER_PARTS = "later_parts"
"""In the metric `experience`: that it is of parts of a batch that were written after the others of the shard, which
another shard had before; its value is the first of their divisions."""
ENDING = "ending"
"""How an episode of an environment ended: `Episode.ending`."""
COMPONENT = "component"
"""A reward function, by its label in `score.rewards`."""
COMPONENT_MEAN, COMPONENT_TRAJECTORIES = "component/mean", "component/trajectories"
"""The mean of what a reward function returned, and of how many trajectories, with the label `component`."""

_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')
_LABELLED = re.compile(rf"([^{{}}]+)\{{({_LABEL.pattern}(?:,{_LABEL.pattern})*)\}}", re.DOTALL)
_ESCAPED = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
_ESCAPES = str.maketrans(_ESCAPED)
_UNESCAPED = {escaped[1]: plain for plain, escaped in _ESCAPED.items()}
_NAMES_OF_0_2_0 = re.compile(
    r"(drawn|refused_share|trajectories|questions|curriculum/level|curriculum/success"
    r"|(?:reward|response_length|accuracy)/mean|(?:accuracy|reward|unanswered)/(?:greedy|sampled))/(.+)",
    re.DOTALL,
)


def labelled(name: str, **labels: str) -> str:
    """`name` with `labels`; without labels `name` itself."""
    if not labels:
        return name
    written = ",".join(f'{label}="{value.translate(_ESCAPES)}"' for label, value in labels.items())
    return f"{name}{{{written}}}"


def split_labels(key: str) -> tuple[str, Mapping[str, str]]:
    """The name and the labels in `key`, the name of a value."""
    if (found := _LABELLED.fullmatch(key)) is not None:
        return found[1], {label: _unescape(value) for label, value in _LABEL.findall(found[2])}
    if (found := _NAMES_OF_0_2_0.fullmatch(key)) is not None:
        return found[1], {TASK: found[2]}
    return key, {}


def values_by_task(values: Mapping[str, float], name: str) -> dict[str, float]:
    """The values of `name` that have a task, by task."""
    return {task: found[name] for task, found in by_label(values, TASK).items() if name in found}


def by_label(values: Mapping[str, float], label: str) -> dict[str, dict[str, float]]:
    """The values that have `label`: by the label's value, and by name."""
    found: dict[str, dict[str, float]] = {}
    for key, value in values.items():
        name, labels = split_labels(key)
        if label in labels:
            found.setdefault(labels[label], {})[name] = value
    return found


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: _UNESCAPED.get(found[1], found[0]), text)
