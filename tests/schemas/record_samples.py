"""One plain record of every class: what the golden files hold, and what tests damage."""

from __future__ import annotations

from schemas import records as r
from schemas.columns import flags, floats, integers, token_ids

VERSION = r.PolicyVersion(2, 17)
PROMPT = r.Prompt(
    number=12,
    purpose="train",
    task="chain_sum",
    text="What is 2 + 3?",
    token_ids=token_ids([1, 5, 9, 2]),
    reference='{"answer": "5"}',
    samples=8,
    sampling=r.Sampling(1.0, 0.95, 0, 64, (2, 7), 42),
)
RESPONSE = r.Response(token_ids([4, 6, 2]), floats([-0.5, -1.25, 0.0]), flags([True, False, True]))
TRAJECTORY = r.Trajectory(
    prompt=PROMPT,
    member=3,
    lease=5,
    attempt=1,
    replica=0,
    incarnation=4,
    response=RESPONSE,
    text="5 — fünf",
    version_spans=(r.VersionSpan(VERSION, 3),),
    newest_version=r.PolicyVersion(2, 18),
    finish_reason="stop",
    error=None,
    started_at=1_700_000_000_000,
    finished_at=1_700_000_000_250,
)

SAMPLES: dict[type, object] = {
    type(record): record
    for record in (
        PROMPT,
        TRAJECTORY,
        r.Assignment(PROMPT, 3, 5, 1, 0, 4, VERSION, RESPONSE, 1_700_000_000_000, (r.VersionSpan(VERSION, 3),)),
        r.Reserve("3-1", VERSION, ("p12.3", "p12.4"), 300, 0, 4),
        r.Release("3-1", ("p12.3", "p12.4"), (8, 9), 1, 6, 0, 4),
        r.Drain(0, 4),
        r.Progress(
            "p12.3", 5, 1, 0, 4, 64, RESPONSE, (r.VersionSpan(VERSION, 3),), r.NextOwner(8, 1, 6), 1_700_000_000_100
        ),
        r.Closed("p12.3"),
        r.RepackPlan(
            plan_id="3-1",
            policy_version=VERSION,
            moves=(r.PlannedMove(0, 1, ("p12.3", "p12.4"), 300),),
            before=(r.ReplicaLoad(0, 280, 4096, 2), r.ReplicaLoad(1, 900, 4096, 5)),
            after=(r.ReplicaLoad(0, 0, 4096, 0), r.ReplicaLoad(1, 1200, 4096, 7)),
            reason="repack",
            planned_at=1_700_000_000_150,
        ),
        r.Cancel(("p12.3", "p12.4"), 0, 4),
        r.Refused("p12.3", 5, 0, 4, "no room", True),
        r.Experience(TRAJECTORY, 0.75, (r.RewardComponent("exact", 1.0, 0.75),), None, 1_700_000_000_300),
        r.Settled("p12.3", 8, "batched", "", 9, 1, 3, 1_700_000_000_400),
        r.MicroBatch(
            batch=9,
            index=0,
            count=1,
            rank=0,
            token_ids=token_ids([1, 5, 9, 2, 4, 6, 2]),
            logprobs=floats([0, 0, 0, 0, -0.5, -1.25, 0]),
            loss_mask=flags([False, False, False, False, True, False, True]),
            lengths=integers([7]),
            prompt_lengths=integers([4]),
            rewards=floats([0.75]),
            trajectory_ids=("p12.3",),
            version_epochs=integers([2]),
            version_numbers=integers([17]),
            staleness=integers([1]),
            lineage_partitions=integers([0]),
            lineage_offsets=integers([33]),
        ),
        r.WeightVersion(
            version=VERSION,
            parent=r.PolicyVersion(2, 16),
            step=17,
            file="2.17.safetensors",
            bytes=1024,
            blake3="ab" * 32,
            tensors=(r.TensorSpec("model.embed_tokens.weight", "BF16", (32, 16)),),
            batches=(9,),
            batch_offsets=(34,),
            trajectories_trained=144,
            final=False,
            created_at=1_700_000_000_500,
        ),
        r.ReplicaStatus(
            0,
            0,
            4,
            "running",
            VERSION,
            8,
            2,
            16,
            512,
            4096,
            9000,
            0.02,
            "host",
            77,
            1_700_000_000_600,
            "first",
            ("3-1",),
        ),
        r.RelayStatus(0, ("2.17", "2.16"), 2048, "host", 78, 1_700_000_000_700),
        r.Metric("train", 17, {"loss": 0.25, "reward": 0.75}, 1_700_000_000_800),
        r.DeadLetter("ScoreTrajectory", "not JSON", "laminar.a.trajectories", 1, 5, b"\x00\xff", 1_700_000_000_900),
        r.CommitNote("laminar.a.score.0", '[3,{"laminar.a.experiences:0":5},{}]', 1_700_000_001_000),
    )
}
