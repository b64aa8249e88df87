"""RunAgents: starts an agent for each episode, and reports its result to the gateway.

The episodes to play follow from the log, so a restarted process starts their agents again; the requests that an agent
made before get their recorded responses.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.runners.step_metrics import phase
from operators.agents.agent_process import AgentTask, play_episode
from operators.agents.config import AgentsConfig
from operators.agents.function_server import FunctionServer
from operators.io.agent_tasks import task_of
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, ReceivedRecord, Restored, ShardFold
from operators.io.finished import FinishedTrajectories
from schemas.records import AGENT, Assignment, Trajectory

log = logging.getLogger(__name__)

CLOSE_S = 10.0


@dataclass(frozen=True)
class RunAgents:
    """Process `index` of `config.processes`, of a run with `partitions` partitions and the files in `folder`."""

    config: AgentsConfig
    shard: ShardConfig
    folder: Path
    secret_file: Path
    partitions: int
    index: int

    def restore(self, restored: Restored) -> AgentsFold:
        return AgentsFold(self, restored.state, restored.start)


class AgentsFold(ShardFold):
    """`_live` are the episodes that have not finished, with the place of their first assignment."""

    def __init__(self, step: RunAgents, state: Mapping[str, Any], start: int) -> None:
        self._step, self._config, self._start = step, step.config, start
        self._finished = FinishedTrajectories(step.partitions, state.get("finished"))
        self._live: dict[str, tuple[PartitionKey, int]] = {}
        self._waiting: deque[AgentTask] = deque()
        self._change = threading.Condition()
        self._stopped: dict[str, threading.Event] = {}
        """By episode that is waiting or played: set once its agent must end."""
        self._error: Exception | None = None
        """Why an agent could not be run: the role ends by it, since its episode would wait for ever."""
        self._closed = False
        self._started = False
        self._work = step.folder / f"agents-{step.index}"
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(parents=True)
        self._functions: FunctionServer | None = None
        if self._config.function:
            (step.folder / "agents").mkdir(exist_ok=True)
            log_file = step.folder / "agents" / "functions.log"
            self._functions = FunctionServer(
                self._config.function, log_file, self._config.env, self._config.memory_limit_mb
            )
        self._threads = [
            threading.Thread(target=self._play, name=f"agent-{number}", daemon=True)
            for number in range(self._config.concurrency)
        ]

    def fold(self, polled: Polled) -> Sequence[Output]:
        if self._error is not None:
            raise self._error
        with phase("start agents"):
            for received in polled.records:
                match received.record:
                    case Assignment() as assignment:
                        self._assign(received, assignment)
                    case Trajectory() as trajectory:
                        self._finish(received, trajectory)
        if polled.caught_up and not self._started and self._config.runs_here:
            self._started = True
            for thread in self._threads:
                thread.start()
        return []

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        low = self._finished.low_water(positions)
        for place, offset in self._live.values():
            low[place] = min(offset, low.get(place, offset))
        return Checkpoint(low_water=low, state={"finished": self._finished.state()})

    def close(self) -> None:
        with self._change:
            self._closed = True
            for stop in self._stopped.values():
                stop.set()
            self._change.notify_all()
        if self._started:
            deadline = time.monotonic() + CLOSE_S
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        if self._functions is not None:
            self._functions.close()
        shutil.rmtree(self._work, ignore_errors=True)

    def _assign(self, received: ReceivedRecord, assignment: Assignment) -> None:
        name, prompt = assignment.trajectory_id, assignment.prompt
        place = PartitionKey(received.topic, received.partition)
        if prompt.environment != AGENT or prompt.number % self._config.processes != self._step.index:
            return
        if name in self._live or name in self._finished:
            return
        self._live[name] = place, received.offset
        task = task_of(prompt, assignment.member)
        with self._change:
            self._stopped[name] = threading.Event()
            self._waiting.append(AgentTask(name, task))
            self._change.notify()

    def _finish(self, received: ReceivedRecord, trajectory: Trajectory) -> None:
        name = trajectory.trajectory_id
        self._finished.add(received, trajectory)
        self._live.pop(name, None)
        with self._change:
            if (stop := self._stopped.get(name)) is not None:
                stop.set()

    # -- in the threads, one for each agent ----------------------------------------------------------------------------

    def _play(self) -> None:
        step = self._step
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                task = self._waiting.popleft()
                stop = self._stopped[task.episode]
            try:
                if not stop.is_set():
                    play_episode(
                        *(self._config, task, step.shard.run, step.folder, step.secret_file, self._work, stop),
                        functions=self._functions,
                        start=self._start,
                    )
            except Exception as error:
                log.exception("the agent of episode %s could not be run", task.episode)
                self._error = error
            finally:
                with self._change:
                    self._stopped.pop(task.episode, None)
