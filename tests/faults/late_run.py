"""An emulated run with late transactional requests in every role, and the anomalies of its log."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from faults.kafka_frames import Api
from faults.proxied_broker import ProxiedBroker
from faults.request_faults import LateRequest, Match, When, before_request, between_offsets_and_outputs
from faults.role_threads import RoleThread, close_roles, start_roles
from faults.run_anomalies import AFTER, RunLog, committed_offsets, run_anomalies, settled_anomalies

from infra.files import create_secret
from pipelines.config import Config, load_config
from pipelines.run.topics import make_topics

TRIES_IN_TESTS = 2
SHARDS = 2
TIMEOUT_S = 150.0
"""How long a round of late requests may take: a role makes a transaction at least every few seconds."""
CONFIG: dict[str, Any] = {
    "prompts": {"source": "synthetic", "prompt_tokens": 32, "max_new_tokens": 64, "samples_per_prompt": 4},
    "rollout": {
        "engine": "emulated",
        "replicas": 2,
        "slots": 16,
        "context": 256,
        "kv_capacity": 2048,
        "emulation": {"stride": 8, "lengths": {"p50": 20, "p99": 64}},
    },
    "score": {"answer": "whole", "rewards": [{"name": "length", "options": {"target": 10, "limit": 200}}]},
    "experience": {"global_batch": 16, "shards": SHARDS},
    "trainer": {"optimizer_steps": 1_000_000, "emulation": {"step_s": [[0, 20], [100_000, 40]]}},
}


class Stalled(Exception):
    """The run made no progress within `TIMEOUT_S`, or a role failed."""


@dataclass
class Found:
    """The results of a run with late requests."""

    tries: Counter[str] = field(default_factory=Counter)
    """Late requests that were delivered, by role."""
    apis: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    """The broker's error codes for them."""
    batches: int = 0
    anomalies: list[str] = field(default_factory=list)
    stalled: str = ""
    """Why the run made no progress: a lost record may block others for ever."""


Choice = Callable[[int], tuple[Api, When]]
"""From the number of a try to the request to hold back, and when to deliver it."""


def late_end_txn(number: int) -> tuple[Api, When]:
    """The choice that loses records if outputs follow offsets in a transaction under the same epoch."""
    return Api.END_TXN, between_offsets_and_outputs(16)


def late_requests_in_every_role(
    kafka: ProxiedBroker,
    run: str,
    folder: Path,
    tries: int,
    choose: Choice = late_end_txn,
) -> Found:
    """Run all roles, deliver late requests of `choose` in all of them `tries` times, then check the log."""
    config = run_config(kafka, run, folder)
    make_topics(config)
    log = RunLog(kafka.broker.config.data_dir / "log", run)
    found = Found()
    roles = start_roles(config)
    try:
        wait_until(roles, lambda: log.count("batches", "MicroBatch") > 0, lambda: "no batch before the faults")
        for number in range(tries):
            _deliver_late(kafka, roles, number, choose, found)
        before = log.count("batches", "MicroBatch")
        wait_until(roles, lambda: log.count("batches", "MicroBatch") > before + 4, lambda: "no batch after the faults")
    except Stalled as stalled:
        found.stalled = str(stalled)
    finally:
        kafka.proxy.clear()
        close_roles(roles)
    committed = committed_offsets(kafka.broker.bootstrap_servers, run, run_inputs(config))
    found.anomalies = settled_anomalies(lambda: run_anomalies(log, committed, SHARDS, AFTER))
    found.batches = len({row["batch"] for _, _, row in log.rows("batches", "MicroBatch")})
    return found


def _deliver_late(kafka: ProxiedBroker, roles: list[RoleThread], number: int, choose: Choice, found: Found) -> None:
    """Deliver one late request in each role."""
    late = {}
    for role in roles:
        api, when = choose(number)
        if not role.config.inputs and api in (Api.ADD_OFFSETS_TO_TXN, Api.TXN_OFFSET_COMMIT):
            api = Api.END_TXN  # a role without inputs commits no offsets
        late[role.name] = kafka.proxy.add(LateRequest(Match([api], role.config.group), when))

    def awaited() -> dict[str, list[str]]:
        return {name: list(map(str, each.seen)) for name, each in late.items() if not each.released.is_set()}

    wait_until(roles, lambda: not awaited(), lambda: f"not delivered; later requests: {awaited()}")
    kafka.proxy.clear()
    for name, each in late.items():
        assert each.request is not None
        each.check_outcome()
        found.tries[name] += 1
        found.apis[Api(each.request.api).name] += 1
        found.answers[str(each.answer)] += 1


def any_late_request(seed: int) -> Choice:
    """A choice for a campaign: any transactional request, delivered at any of the next twelve points."""
    rng = random.Random(seed)
    apis = (Api.ADD_PARTITIONS_TO_TXN, Api.ADD_OFFSETS_TO_TXN, Api.TXN_OFFSET_COMMIT, Api.END_TXN, Api.END_TXN)

    def choose(number: int) -> tuple[Api, When]:
        when = between_offsets_and_outputs(16) if rng.random() < 0.3 else before_request(rng.randint(1, 12))
        return rng.choice(apis), when

    return choose


def run_config(kafka: ProxiedBroker, run: str, folder: Path, **sections: Any) -> Config:
    """The configuration of the run; `sections` are added to it."""
    file = folder / "late.toml"
    servers = f"127.0.0.1:{kafka.proxy.port}"
    kafka_section = {"bootstrap_servers": servers, "partitions": SHARDS}
    file.write_text(
        tomli_w.dumps(
            {
                **CONFIG,
                "run": {"time_scale": 100.0, "name": run, "folder": str(folder)},
                "kafka": kafka_section,
                "relay": {**relay_section(folder), "store": str(folder / "weights")},
                "autoscaling": autoscaling_section(folder / "prices.csv"),
                **sections,
            }
        )
    )
    return load_config(file)


def autoscaling_section(prices: Path) -> dict[str, Any]:
    """The section of an autoscaler that wants one or two processes, in turn: there is one, so only that is reached."""
    prices.write_text("seconds,price\n" + "".join(f"{second},{second % 2}\n" for second in range(int(2 * TIMEOUT_S))))
    limits = {"maximum": 2, "observe_s": 0.2, "stable_s": 0.2, "cooldown_s": 0.2}
    return {"policy": "price", "price_file": str(prices), "prices": [{"price": 0.5, "processes": 2}], **limits}


def relay_section(folder: Path) -> dict[str, str]:
    """The settings of relays that a test starts role by role: the token that `laminar run` would have made."""
    token_file = folder / "relay.secret"
    create_secret(token_file)
    return {"token_file": str(token_file)}


def run_inputs(config: Config) -> dict[str, list[tuple[str, int]]]:
    shards = [(partition, f"experience.{partition % SHARDS}") for partition in range(config.kafka.partitions)]
    inputs = {
        "placement.0": [("prompts", 0), ("eval-prompts", 0)],
        "score.0": [("trajectories", partition) for partition, _ in shards],
        "evaluation.0": [("experiences", partition) for partition, _ in shards],
        "trainer.0": [("batches", partition) for partition in range(SHARDS)],
    }
    for partition, role in shards:
        inputs.setdefault(role, []).append(("experiences", partition))
    return inputs


def wait_until(
    roles: list[RoleThread], condition: Callable[[], bool], why: Callable[[], str], every_s: float = 0.05
) -> None:
    """Return once `condition`, which is read every `every_s` seconds, holds. Raises Stalled."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        for role in roles:
            if role.error is not None:
                raise Stalled(f"{role.name} has failed: {role.error!r}")
        if time.monotonic() > deadline:
            raise Stalled(why())
        time.sleep(every_s)
