"""The cost of the gateway: latency beyond the engine, throughput, and what encoding text again would get wrong.

    python -m benchmarks.gateway [--sessions 256] [--rate 20] [--turns 4] [--tokens 400] [--json]
    python -m benchmarks.gateway --transcripts runs/NAME

Kafka, placement, rollouts and the gateway are real; the engines are emulated, so their time is known. `latency`: agents
play sessions of several turns at `rate` requests/s together; the engines are so fast that the whole latency is that of
the gateway, Kafka and the rollout process. First requests include the assignment of the session by placement.
`stages` and the CPU time of each process show where the time goes. `throughput`: the engine is the bottleneck; as many
sessions of one turn as prompts without a gateway, of the same lengths. `--transcripts` counts, in the log of a run with
agents, the tokens of responses that a proxy would have got wrong that decodes them and encodes the text again.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from benchmarks.ended_runs import rows_of
from benchmarks.gateway_stages import Call, CpuSeconds, stages_of, table_of
from benchmarks.processes import OthersWatch
from infra.files import read_secret
from infra.kafka.broker import BrokerConfig, start_broker
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.models.checkpoint_folder import load_tokenizer, save_folder
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from operators.io.episode_keys import ADDRESS_FILE, SECRET_FILE, EpisodeKeys
from pipelines.config import Config, load_config
from pipelines.present.report.machine import describe_machine
from pipelines.run.topics import make_topics
from schemas.codec import encode
from schemas.columns import token_ids
from schemas.records import PolicyVersion, Progress, Prompt, Sampling, Trajectory, TurnEnded, TurnRequest, WeightVersion
from schemas.topics import INBOX, PROGRESS, PROMPTS, RELAY, TRAJECTORIES, Topic

ROLES = ("placement", "rollout", "gateway")
START_S, END_S = 600.0, 900.0
TEXT = "12+34="
RETRIES = 10


@dataclass(frozen=True)
class Load:
    """`sessions` of `turns` turns at a time, begun so that all together make `rate` requests/s; None: all at once.

    `waves` sessions follow one another. Their responses have half of `tokens` to one and a half times as many.
    """

    sessions: int
    turns: int
    rate: float | None
    tokens: int
    time_scale: float
    waves: int = 1

    def length_of(self, number: int) -> int:
        """Tokens of each response of session `number`."""
        return self.tokens if self.rate is not None else self.tokens // 2 + number * 7919 % (self.tokens + 1)


class Run:
    """The roles of a run, and its prompts."""

    def __init__(self, config: Config, file: Path, broker_pid: int) -> None:
        self.config, self._file, self._broker_pid = config, file, broker_pid
        self.folder, self.name = config.run_folder, config.run.name
        self._producer = BoundedProducer(config.kafka.client())
        self._processes: list[subprocess.Popen[bytes]] = []
        tokenizer: Any = load_tokenizer(Path(config.model.path))
        self._prompt = [int(each) for each in tokenizer.encode(TEXT)]
        self.published = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Create the topics, start the roles and publish the first weights. Raises RuntimeError."""
        make_topics(self.config, print)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._send(RELAY, WeightVersion(PolicyVersion(1, 0), None, 0, "", 0, "", (), (), (), 0, False, 0), b"1.0")
        for role in ROLES:
            with (self.folder / f"{role}.log").open("w") as log:
                command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gateway_roles", str(self._file), role]
                self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        deadline = time.monotonic() + START_S
        while not (self.folder / ADDRESS_FILE).exists():
            if time.monotonic() > deadline or any(each.poll() is not None for each in self._processes):
                raise RuntimeError(f"the roles do not start: see {self.folder}/*.log")
            time.sleep(0.1)

    def publish(self, environment: str, tokens: int) -> str:
        """Publish a prompt of one sample; returns the id of its trajectory. Thread-safe."""
        with self._lock:
            number = self.published
            self.published += 1
        sampling = Sampling(1.0, 1.0, 0, tokens, (), number)
        prompt = Prompt(
            number, "train", "sums", TEXT, token_ids(self._prompt), "{}", 1, sampling, environment=environment
        )
        self._send(PROMPTS, prompt, prompt.prompt_id.encode())
        return f"p{number}.0"

    def last_finished(self) -> float:
        """When the last trajectory of all prompts published so far finished, in Unix seconds."""
        topic, client = TRAJECTORIES.name(self.name), self.config.kafka.client()
        while len(finished := rows_of(client, topic, Trajectory)) < self.published:
            time.sleep(2.0)
        return max(each.finished_at for each in finished) / 1000

    def cpu_seconds(self) -> CpuSeconds:
        """A count of the CPU seconds of each process from now on."""
        roles = {role: process.pid for role, process in zip(ROLES, self._processes, strict=True)}
        return CpuSeconds({"kafka": self._broker_pid, **roles})

    def close(self) -> None:
        """End the roles."""
        self._producer.close()
        for each in self._processes:
            each.send_signal(signal.SIGKILL)
            each.wait()

    def _send(self, topic: Topic, record: Any, key: bytes) -> None:
        value, headers = encode(record)
        self._producer.send(topic.name(self.name), value, key=key, headers=headers, partition=0)


@contextmanager
def running(load: Load, folder: Path, name: str) -> Iterator[Run]:
    """A run with emulated engines for `load`."""
    model = folder / "model"
    if not model.exists():
        save_folder(*build_demo_model(DemoModelConfig(layers=1)), model)
    with start_broker(BrokerConfig(folder / f"kafka-{name}")) as broker:
        file = folder / f"{name}.toml"
        file.write_text(_configuration(load, model, name, folder, broker.bootstrap_servers))
        run = Run(load_config(file), file, broker.pid)
        try:
            run.start()
            yield run
        finally:
            run.close()


def _configuration(load: Load, model: Path, name: str, folder: Path, servers: str) -> str:
    return f"""
[run]
name = "{name}"
folder = "{folder}"
time_scale = {load.time_scale}
layout = "isolated"
[kafka]
bootstrap_servers = "{servers}"
[model]
path = "{model}"
[prompts]
task = "chain_sum"
environment = "agent"
max_new_tokens = 4096
samples_per_prompt = 2
[gateway]
serve_requests = 0
[score]
rewards = [{{ name = "environment" }}]
[experience]
global_batch = 8192
[rollout]
context = 8192
slots = 256
[rollout.emulation]
vocabulary = {len(load_tokenizer(model))}
[rollout.emulation.lengths]
p50 = 1e9
p99 = 1e9
"""


async def play(run: Run, load: Load) -> list[list[Call]]:
    """Play the sessions of `load`; the turns of each session."""
    url = json.loads((run.folder / ADDRESS_FILE).read_text())["url"]
    keys = EpisodeKeys(run.name, read_secret(run.folder / SECRET_FILE))
    source, rate = random.Random(0), load.rate
    between = 0.0 if rate is None else load.sessions / rate  # seconds from turn to turn of a session

    async def agent(number: int, client: httpx2.AsyncClient) -> list[list[Call]]:
        await asyncio.sleep(between * number / load.sessions)
        return [await session(number + wave * load.sessions, client) for wave in range(load.waves)]

    async def session(number: int, client: httpx2.AsyncClient) -> list[Call]:
        begin = time.time()
        name = await asyncio.to_thread(run.publish, "agent", 4096)
        messages: list[dict[str, Any]] = [{"role": "user", "content": TEXT}]
        headers, calls = {"authorization": f"Bearer {keys.key_of(name)}"}, []
        for turn in range(load.turns):
            if turn:
                await asyncio.sleep(between * source.uniform(0.9, 1.1))
                begin = time.time()
            body = {"messages": messages, "max_tokens": load.length_of(number)}
            response = await _post(client, "/chat/completions", body, headers)
            if response.is_error:
                raise RuntimeError(f"session {number}, turn {turn}: {response.text}")
            calls.append(Call(name, 1000 * begin, 1000 * time.time()))
            message = response.json()["choices"][0]["message"]
            messages += [message, {"role": "user", "content": f"{number % 10}+1="}]
        ended = await _post(client, "/episode/end", {"reward": 1.0}, headers)
        ended.raise_for_status()
        return calls

    limits = httpx2.Limits(max_connections=load.sessions, max_keepalive_connections=load.sessions)
    async with httpx2.AsyncClient(base_url=url, limits=limits) as client:
        played = await asyncio.gather(*(agent(number, client) for number in range(load.sessions)))
    return [session for sessions in played for session in sessions]


async def _post(client: httpx2.AsyncClient, path: str, body: Any, headers: dict[str, str]) -> httpx2.Response:
    """The response; a lost connection is repeated and marked, as OpenAI's clients do."""
    for attempt in range(RETRIES):
        marked = {**headers, "x-stainless-retry-count": str(attempt)}
        try:
            return await client.post(path, json=body, headers=marked, timeout=END_S)
        except httpx2.TransportError:
            await asyncio.sleep(0.1)
    raise RuntimeError(f"the gateway has not responded to {RETRIES} requests")


def latency(load: Load, folder: Path) -> dict[str, Any]:
    """Latency of first and of later turns, in milliseconds, after a warm-up of half as many sessions of two turns."""
    with running(load, folder, "latency") as run:
        warm = Load(max(1, load.sessions // 2), 2, load.rate, load.tokens, load.time_scale)
        asyncio.run(play(run, warm))
        gc.disable()  # a collection would hold up all agents
        others, cpu = OthersWatch(), run.cpu_seconds()
        begin = time.perf_counter()
        sessions = asyncio.run(play(run, load))
        seconds = time.perf_counter() - begin
        gc.enable()
        used, share = cpu.used(), others.share()
        calls = [call for session in sessions for call in session]
        stages = stages_of(run.config.kafka.client(), run.name, calls)
    first = [session[0] for session in sessions]
    later = [call for session in sessions for call in session[1:]]
    return {
        "sessions": load.sessions,
        "requests_per_s": len(calls) / seconds,
        **{f"first_{name}_ms": value for name, value in _percentiles(first).items()},
        **{f"later_{name}_ms": value for name, value in _percentiles(later).items()},
        "stages": stages,
        "cpu_ms_a_request": {name: 1000 * value / len(calls) for name, value in used.items()},
        "busy_for_others": share,
    }


def throughput(load: Load, folder: Path, rounds: int) -> dict[str, Any]:
    """Sessions/s with agents and prompts/s without, interleaved; the median of their ratios.

    Every agent plays `load.waves` sessions, one after another, as long as those of the other side: so the engines stay
    full until the end on both. A side lasts until the last trajectory has finished.
    """
    seconds: dict[str, list[float]] = {"agents": [], "prompts": []}
    cpu: dict[str, float] = {}
    with running(load, folder, "throughput") as run:
        total = load.sessions * load.waves
        others = OthersWatch()
        for _ in range(rounds):
            begin, watch = time.time(), run.cpu_seconds()
            asyncio.run(play(run, load))
            cpu = watch.used()
            seconds["agents"].append(run.last_finished() - begin)
            begin = time.time()
            for number in range(total):
                run.publish("", load.length_of(number))
            seconds["prompts"].append(run.last_finished() - begin)
        share = others.share()
    ratios = [without / agents for agents, without in zip(seconds["agents"], seconds["prompts"], strict=True)]
    return {
        "sessions": load.sessions,
        "with_gateway_per_s": rounds * total / sum(seconds["agents"]),
        "without_per_s": rounds * total / sum(seconds["prompts"]),
        "ratio_median": float(np.median(ratios)),
        "cpu_ms_a_session": {name: 1000 * value / total for name, value in cpu.items()},
        "busy_for_others": share,
    }


def retokenised(folder: Path) -> dict[str, Any]:
    """Counts the responses in the log of the ended run in `folder` that their own text does not encode to."""
    config = load_config(folder / "config.toml")
    log, tokenizer = folder / "kafka" / "log", load_tokenizer(config.model_folder())
    client = ClientProperties.of_log(log.resolve()) if log.is_dir() else config.kafka.client()
    requests = {each.turn_id: each for each in rows_of(client, INBOX.name(config.run.name), TurnRequest)}
    tokens: dict[str, dict[int, int]] = {}
    for part in rows_of(client, PROGRESS.name(config.run.name), Progress):
        known = tokens.setdefault(part.trajectory_id, {})
        known.update(enumerate(part.gained.token_ids.to_pylist(), part.start))
    responses = drawn = wrong = differing = 0
    for end in rows_of(client, PROGRESS.name(config.run.name), TurnEnded):
        request, known = requests.get(end.turn_id), tokens.get(end.trajectory_id, {})
        if request is None or end.stop - 1 not in known:
            continue
        own = [known[at] for at in range(end.start + len(request.token_ids), end.stop)]
        if own and own[-1] in tokenizer.all_special_ids:  # the chat template of the next request adds it again
            own.pop()
        text = tokenizer.decode(own, skip_special_tokens=True)
        again = tokenizer.encode(text, add_special_tokens=False)
        pairs = enumerate(zip(own, again, strict=False))
        same = next((at for at, (a, b) in pairs if a != b), min(len(own), len(again)))
        responses, drawn = responses + 1, drawn + len(own)
        wrong += len(own) - same
        differing += own != again
    return {"responses": responses, "tokens": drawn, "responses_differing": differing, "tokens_wrong": wrong}


def _percentiles(calls: Sequence[Call]) -> dict[str, float]:
    if not calls:
        return {}
    return {f"p{each}": float(np.percentile([call.ended - call.began for call in calls], each)) for each in (50, 99)}


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--sessions", type=int, default=256)
    arguments.add_argument("--rate", type=float, default=20.0, help="requests/s of all sessions")
    arguments.add_argument("--turns", type=int, default=4)
    arguments.add_argument("--tokens", type=int, default=400, help="of a response of throughput, in the mean")
    arguments.add_argument("--rounds", type=int, default=2, help="of throughput")
    arguments.add_argument("--only", choices=("latency", "throughput"))
    arguments.add_argument("--transcripts", type=Path, metavar="RUN", help="count wrong tokens in this run instead")
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    found: dict[str, Any] = {}
    if options.transcripts is not None:
        found["transcripts"] = retokenised(options.transcripts)
    else:
        with tempfile.TemporaryDirectory() as folder:
            if options.only != "throughput":
                fast = Load(options.sessions, options.turns, options.rate, 16, 1000.0)
                found["latency"] = latency(fast, Path(folder))
            if options.only != "latency":
                slow = Load(options.sessions, 1, None, options.tokens, 1.0, waves=3)
                found["throughput"] = throughput(slow, Path(folder), options.rounds)
    found["machine"] = {**describe_machine(), "load_average": os.getloadavg()[0]}
    for name, values in found.items():
        stages = values.pop("stages", None) if not options.json else None
        print(json.dumps({name: values}) if options.json else f"{name}: {values}")
        if stages is not None:
            print(table_of(stages))


if __name__ == "__main__":
    main()
