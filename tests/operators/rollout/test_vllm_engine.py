"""The vLLM engine against the transformers engine: the same draws from either engine's logits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from tiny_engines import engine, mixed, request, run
from tiny_models import tiny_model
from vllm_engines import FAMILY, model_folder, vllm_engine

from infra.models.weights import save_weights
from schemas.records import PolicyVersion

pytest.importorskip("vllm", reason="make vllm-test has it")


def test_vllm_draws_the_tokens_of_the_transformers_engine() -> None:
    asked = mixed(24)
    ours, theirs = run(engine(FAMILY), asked), run(vllm_engine(), asked)
    for one in asked:
        mine, other = ours[one.trajectory_id], theirs[one.trajectory_id]
        assert mine.generated.token_ids.tolist() == other.generated.token_ids.tolist()
        assert np.abs(mine.generated.logprobs - other.generated.logprobs).max() < 1e-4
        assert mine.finish_reason == other.finish_reason


def test_vllm_resumes_a_trajectory_of_the_transformers_engine() -> None:
    asked = mixed(6)
    whole, source = run(engine(FAMILY), asked), engine(FAMILY)
    for one in asked:
        source.submit(one)
    done = {each.trajectory_id for _ in range(3) for each in source.step()}
    released = source.release([one.trajectory_id for one in asked])
    left = [replace(one, partial=released[one.trajectory_id]) for one in asked if one.trajectory_id in released]
    resumed = run(vllm_engine(), left)
    assert done | resumed.keys() == whole.keys()
    for name, completion in resumed.items():
        assert completion.generated.token_ids.tolist() == whole[name].generated.token_ids.tolist()


def test_vllm_load_resets_the_prefix_cache(tmp_path: Path) -> None:
    save_weights(tiny_model(FAMILY, seed=1), tmp_path / "w")
    asked = [request(i, new=12, prompt=40) for i in range(3)]
    it = vllm_engine()
    before = run(it, asked)
    it.load(tmp_path / "w", PolicyVersion(1, 1))
    ours = engine(FAMILY)
    ours.load(tmp_path / "w", PolicyVersion(1, 1))
    after, expected = run(it, asked), run(ours, asked)
    for name in expected:
        assert after[name].generated.token_ids.tolist() == expected[name].generated.token_ids.tolist()
    assert any(before[name].generated.token_ids.tolist() != after[name].generated.token_ids.tolist() for name in after)


def test_vllm_rejects_compiled_code_on_a_cpu() -> None:
    from operators.rollout.vllm_engine import open_vllm

    with pytest.raises(ValueError, match="enforce_eager must be true on a CPU"):
        open_vllm(model_folder(FAMILY), slots=2, context=64, enforce_eager=False)


def test_vllm_does_not_leave_ld_preload() -> None:
    vllm_engine()
    assert "tcmalloc" not in os.environ.get("LD_PRELOAD", "")


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_vllm_workers_end_with_their_engine(end: str, tmp_path: Path) -> None:
    save_weights(tiny_model(FAMILY, seed=1), tmp_path / "w")
    script = Path(__file__).with_name("vllm_two_workers.py")
    command = [sys.executable, "-W", "ignore", str(script), str(model_folder(FAMILY)), str(tmp_path / "w")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            reported = json.loads(next(line for line in process.stdout if line.startswith("{")))
            started = psutil.Process(process.pid).children(recursive=True)
            assert len(started) >= 2
            if end == "killed":
                process.kill()
            process.stdin.close()
            assert process.wait(60) == (0 if end == "closed" else -signal.SIGKILL)
            _, left = psutil.wait_procs(started, timeout=30)
            assert not left
        finally:
            process.kill()
    ours = engine(FAMILY)
    ours.load(tmp_path / "w", PolicyVersion(1, 1))
    assert reported == {name: each.generated.token_ids.tolist() for name, each in run(ours, mixed(6)).items()}
