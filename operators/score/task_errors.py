"""By task: the scored trajectories of training, those with an error, and the first error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from infra.workers.error_text import first_line
from schemas.block import Block
from schemas.metric_labels import FIRST_ERROR, TASK, TEXT, by_label, labelled

MAX_FIRST_ERRORS = 8
"""Tasks whose first error is kept, with at most `MAX_CHARACTERS`: each commit note holds it."""
MAX_CHARACTERS = 160


class TaskErrorCounts:
    """Values of the metric `score` with the label `task`; they continue from `earlier`.

    `first_error` is 1, with the first line of the task's first error in the label `text`.
    """

    def __init__(self, earlier: Mapping[str, int]) -> None:
        self.values = Counter(earlier)

    def add(self, experiences: Block, trained: pa.Array) -> None:
        """Count the `experiences` for which `trained` is true."""
        tasks = experiences.column("trajectory.prompt.task").filter(trained)
        errors = experiences.column("error").filter(trained)
        wrong = pc.is_valid(errors)
        failed, messages = tasks.filter(wrong), errors.filter(wrong)
        for name, found in (("trajectories", tasks), ("errors", failed)):
            for each in pc.value_counts(found).to_pylist():
                self.values[labelled(name, task=each["values"])] += each["counts"]
        first: dict[str, str] = {}
        for task, message in zip(failed.to_pylist(), messages.to_pylist(), strict=True):
            first.setdefault(task, message)
        self._keep(first)

    def _keep(self, first: Mapping[str, str]) -> None:
        """Keep the errors of tasks that had none before."""
        known = {task for task, values in by_label(self.values, TASK).items() if FIRST_ERROR in values} if first else ()
        new = [task for task in first if task not in known][: MAX_FIRST_ERRORS - len(known)]
        for task in new:
            self.values[labelled(FIRST_ERROR, **{TASK: task, TEXT: first_line(first[task])[:MAX_CHARACTERS]})] = 1
