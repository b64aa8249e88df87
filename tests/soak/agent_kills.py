"""Kills of each role while 100 agents work: what the agents saw, and what was trained.

    .venv/bin/python tests/soak/agent_kills.py --folder build/soak/agents

A cell is a run of agents (tests/end_to_end/talking_agent.py), in which one role or the broker is killed 20 times, each
time after more turns. It passes if no episode failed, none was lost or trained twice, and each has the texts, the
number of tokens and the reward that its agent saw. `longest s` is the longest wait for a response: what an agent saw in
its last attempt, or the log shows between the order of a turn and its end, in all attempts. The log does not have the
wait before an order, so a killed agent's wait for its assignment or its gateway is not in it. Results are kept, and the
campaign continues, as in fault_campaign.py.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "end_to_end")]

from kills import BROKER, kill  # noqa: E402
from laminar_runs import Command, CommandServer, LaminarRun  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from small_runs import make_model, write_config  # noqa: E402
from soak.fault_campaign import Found, campaign  # noqa: E402

from infra.kafka.properties import ClientProperties  # noqa: E402
from infra.kafka.topic_reader import read_topic  # noqa: E402
from schemas.records import Trajectory, TurnEnded, TurnRequest  # noqa: E402
from schemas.topics import INBOX, PROGRESS, TRAJECTORIES, Topic  # noqa: E402

AGENT = REPOSITORY / "tests" / "end_to_end" / "talking_agent.py"
TARGETS = ("gateway-0", "rollout-0", "placement", "agents-0", "score", "experience", "trainer", BROKER)
TURNS = 10
"""Turns that end between two kills."""
BETWEEN_S = 12.0
"""Seconds between two kills, at least: a role that dies seven times in a minute ends the run."""
COLUMNS = ("kills", "restarts", "episodes", "failed", "turns", "longest_s", "trained", "lost", "trained_twice")


def cell(folder: Path, target: str, kills: int, agents: int) -> Found:
    """A run of `agents` agents, in which `target` is killed `kills` times."""
    temporary = folder / "temporary"
    temporary.mkdir()
    model = make_model(folder / "model", layers=1)
    commands = CommandServer(model, temporary)
    run = LaminarRun(
        commands,
        folder / "here",
        write_config(folder / "small.toml", model),
        f"agents-{target}",
        "prompts.environment=agent",
        "prompts.heldout=0",
        "prompts.max_new_tokens=200",
        f"agents.function={AGENT}:talk",
        f"agents.concurrency={agents}",
        "agents.retries=0",
        "agents.transcripts=true",
        "score.rewards=[{name='environment'}]",
        f"rollout.slots={agents}",
        f"experience.global_batch={agents // 2}",
        "trainer.optimizer_steps=1000000",
    )
    try:
        for number in range(kills):
            _until_turns(run, (number + 1) * TURNS)
            kill(run, target)
            time.sleep(BETWEEN_S)
        _until_turns(run, (kills + 3) * TURNS)
        restarts = sum(role["restarts"] for role in run.state()["roles"].values())
        found = _seen(run)
        run.signal(signal.SIGINT)
        assert run.wait(240) == 128 + signal.SIGINT, run.output()
        audit_command = Command(
            commands, folder / "here" / "audit", "runs", "audit", "--run", str(run.folder), "--json"
        )
        assert audit_command.wait() == 0, audit_command.output()
        audit = json.loads(audit_command.output())
        return {"kills": kills, "restarts": restarts, **found} | {name: audit[name] for name in COLUMNS[-3:]}
    finally:
        run.clean_up()
        commands.close()


def _until_turns(run: LaminarRun, turns: int) -> None:
    run.until(lambda: run.state().get("bootstrap_servers"), 120, "a broker")
    run.until(lambda: len(_rows(run, PROGRESS, TurnEnded)) >= turns, 300, f"{turns} turns")


def _rows(run: LaminarRun, topic: Topic, kind: type) -> list[Any]:
    """The records of class `kind`; none while the broker is away."""
    try:
        servers = run.state()["bootstrap_servers"]
        found = read_topic(ClientProperties.at(servers), topic.name(run.name))
        return [row for record in found for row in record.rows if isinstance(row, kind)]
    except (KeyError, OSError, RuntimeError):
        return []


def _seen(run: LaminarRun) -> Found:
    """What the agents saw. Raises AssertionError if a trajectory differs from it, or an agent had an error."""
    # The broker may just have been killed, and has no records then.
    topics = ((PROGRESS, TurnEnded), (TRAJECTORIES, Trajectory), (INBOX, TurnRequest))
    ended, finished, orders = (
        run.until(partial(_rows, run, *each), 120, f"the {each[1].__name__}s") for each in topics
    )
    failed = [each.error for each in finished if each.error is not None]
    assert not failed, failed[:5]
    reports = [json.loads(each.text) for each in finished]
    for each, seen in zip(finished, reports, strict=True):
        messages = json.loads(each.conversations[0].messages)
        texts = [said["content"] for said in messages if said["role"] == "assistant"]
        found = {"drawn": sum(each.response.loss_mask.to_pylist()), "reward": each.episode.rewards[0], "texts": texts}
        differing = {name: (value, seen[name]) for name, value in found.items() if value != seen[name]}
        assert not differing, f"{each.trajectory_id} and what its agent saw: {differing}"
    errors = [file.name for file in (run.folder / "agents").glob("*.log") if "Traceback" in file.read_text()]
    assert not errors, f"these agents had an error: {errors[:5]}"
    longest_s = max(_longest_turn_s(orders, ended), *(seen["longest_s"] for seen in reports))
    return {"episodes": len(finished), "failed": 0, "turns": len(ended), "longest_s": round(longest_s, 1)}


def _longest_turn_s(requests: list[TurnRequest], ended: list[TurnEnded]) -> float:
    """The longest time from the first order of a turn to its end."""
    ordered: dict[tuple[str, str], int] = {}
    for each in requests:
        key = (each.trajectory_id, each.turn_id)
        ordered[key] = min(each.written_at, ordered.get(key, each.written_at))
    waits = [each.written_at - ordered[key] for each in ended if (key := (each.trajectory_id, each.turn_id)) in ordered]
    return max(waits, default=0) / 1000


def main() -> None:
    """Run the missing cells, print the table."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--folder", type=Path, required=True, help="the folder of runs and results.json")
    arguments.add_argument("--kills", type=int, default=20)
    arguments.add_argument("--agents", type=int, default=100)
    arguments.add_argument("--only", choices=TARGETS, action="append")
    options = arguments.parse_args()
    targets = options.only or TARGETS
    cells = {each: partial(cell, target=each, kills=options.kills, agents=options.agents) for each in targets}
    results = campaign(options.folder.absolute(), cells)
    table = Table("killed", *(name.replace("_", " ") for name in COLUMNS), "result", "seconds")
    for name in targets:
        found = results[name]
        figures = [str(found.get(column, "")) for column in COLUMNS]
        table.add_row(name, *figures, found.get("error", "ok")[:200], str(found["seconds"]))
    Console(width=160).print(table)
    sys.exit(any("error" in results[name] for name in targets))


if __name__ == "__main__":
    main()
