"""`laminar run` with the vLLM engine, whose process is killed during the run (`make vllm-test`)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from laminar_runs import StartRun
from small_runs import LENGTH_REWARD
from transformers import AutoModelForCausalLM

from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import read_topic
from infra.listening import exposed_addresses, listening_sockets
from schemas.records import Experience, Trajectory
from schemas.topics import EXPERIENCES

pytest.importorskip("vllm", reason="make vllm-test has it")

STEPS = 4
AT_MOST_S = 900
"""It takes 40 s on idle processors, and longer on shared ones."""
CHANGES = ("rollout.engine=vllm", "rollout.replicas=2", "rollout.heartbeat_s=0.5", "trainer.learner.learning_rate=1e-3")


@pytest.mark.timeout(3 * AT_MOST_S)
@pytest.mark.parametrize("token_sampler", ["laminar", "vllm"])
def test_run_with_vllm_trains_after_a_killed_rollout(
    start_run: StartRun, broker: Broker, run_id: str, model_folder: Path, token_sampler: str
) -> None:
    servers = broker.bootstrap_servers
    steps = f"trainer.optimizer_steps={STEPS}"
    sampler = f"rollout.token_sampler={token_sampler}"
    run = start_run(run_id, f"kafka.bootstrap_servers={servers}", steps, LENGTH_REWARD, sampler, *CHANGES)
    rollout = run.pid_of("rollout-0")
    log = run.folder / "metrics.jsonl"
    run.until(lambda: log.exists() and '"trainer"' in log.read_text(), AT_MOST_S, "the first optimizer step")
    sockets = listening_sockets(run.processes())
    assert sockets
    assert not exposed_addresses(sockets)  # also where the host name has an address of the network
    os.kill(rollout, signal.SIGKILL)
    assert run.wait(AT_MOST_S) == 0, run.output()
    audit = run.audit()
    assert audit["passed"]
    assert (audit["trained"], audit["lost"], audit["trained_twice"]) == (STEPS * 16, 0, 0)
    assert run.state()["roles"]["rollout-0"]["restarts"] == 1
    assert not run.leftovers()

    records = read_topic(ClientProperties.at(servers), EXPERIENCES.name(run.name))
    rows = [row.trajectory for record in records for row in record.rows if isinstance(row, Experience)]
    versions = {row.version_spans[0].version for row in rows if row.version_spans}
    assert len(versions) > 2
    assert {row.replica for row in rows} == {0, 1}
    assert {row.token_sampler for row in rows} == {token_sampler}
    first = [row for row in rows if row.version_spans and row.version_spans[0].version == min(versions)]
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    for row in first[:8]:
        assert np.abs(logprobs(model, row) - row.response.logprobs.to_numpy()).max() < 1e-4


def logprobs(model: torch.nn.Module, row: Trajectory) -> np.ndarray:
    """Of `row`'s response by one forward over all of it, under its own temperature."""
    prompt, response = row.prompt.token_ids.to_numpy(), row.response.token_ids.to_numpy()
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double()
    scaled = (logits / (row.prompt.sampling.temperature or 1.0)).log_softmax(-1)
    return scaled.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
