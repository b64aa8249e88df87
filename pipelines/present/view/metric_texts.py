"""What the values of a run's roles are, with their units: the HELP texts of Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

_SINCE = "since the start of the run"
TEXTS: Mapping[str, Mapping[str, str]] = {
    "trainer": {
        "advantage/": "Mean absolute advantage of the last batch.",
        "batch/": "Size of the last batch, in trajectories, groups, rows or tokens as the name says.",
        "batches/untrained": "1 if the last batch could not be trained.",
        "clip_ratio/high": "Share of the last batch's tokens whose gradient the upper clip changed, 0 to 1.",
        "clip_ratio/low": "Share of the last batch's tokens whose gradient the lower clip changed, 0 to 1.",
        "correction/weight_mean": "Mean weight of the off-policy correction in the last batch.",
        "cpu/model_seconds": "CPU time of the thread that trains since its start, in seconds.",
        "cpu/process_seconds": "CPU time of the trainer's process since its start, in seconds.",
        "critic/explained_variance": "Share of the returns' variance that the critic explains, at most 1.",
        "critic/grad_norm": "Largest gradient norm of the critic in the last update.",
        "critic/loss": "Loss of the critic in the last update.",
        "entropy": "Mean entropy of the policy in the last batch, nats per token.",
        "ess": "Effective sample size of the last batch as a share of its tokens, 0 to 1.",
        "frac_reward_zero_std": "Share of groups in the last batch whose rewards are all equal, 0 to 1.",
        "grad_norm": "Largest gradient norm in the last update, before clipping.",
        "importance_ratio/": "Ratio of the trainer's to the rollout's probability of a token in the last batch.",
        "kl/mismatch": "KL between the policies that generated and train the last batch, nats per token.",
        "kl/ref": "KL of the policy to the reference model in the last batch, nats per token.",
        "learning_rate": "Learning rate of the last update.",
        "loss": "Mean policy loss in the last update.",
        "mismatch/": "Difference of rollout's and trainer's logprobs under the same weights: nats or share of tokens.",
        "queue/lag": "Batches that wait for the trainer.",
        "response_length/clip_ratio": "Share of responses in the last batch that reached the limit of tokens, 0 to 1.",
        "response_length/max": "Longest response of the last batch, in tokens.",
        "response_length/mean": "Mean response of the last batch, in tokens.",
        "reward/mean": "Mean reward of the last batch.",
        "reward/std": "Standard deviation of the rewards of the last batch.",
        "skipped_updates": "Updates left out because a loss or gradient was not finite.",
        "staleness/max": "Largest staleness in the last batch, in versions behind the newest.",
        "staleness/mean": "Mean staleness of the last batch, in versions behind the newest.",
        "throughput/samples_per_s": "Trajectories trained per second of the last update.",
        "throughput/tokens_per_s": "Tokens trained per second of the last update.",
        "time/": "Time of this part of the last optimizer step, in seconds.",
        "time/update": "Time of the last update, in seconds.",
        "time/wait": "Time that the trainer waited for the last batch, in seconds.",
        "tokens": "Tokens of the last batch.",
        "trainer/idle_ratio": "Share of time that the trainer waited for the last batch, 0 to 1.",
        "trajectories": f"Trajectories trained, {_SINCE}.",
        "weight_sync/seconds": "Time that the trainer stopped to publish the last version, in seconds.",
    },
    "experience": {
        "accuracy/mean": "Mean accuracy of the last batch by task, 0 to 1.",
        "batches": f"Batches formed, {_SINCE}.",
        "buffer/groups": "Groups in the buffer.",
        "buffer/trajectories": "Trajectories in the buffer.",
        "component/mean": "Mean of a reward component in the last batch, before weighting.",
        "component/trajectories": "Trajectories of the last batch that have the reward component.",
        "curriculum/level": "Level of the curriculum.",
        "curriculum/success": "Share of correct answers that the curriculum counts, 0 to 1.",
        "buffer/left_out": "Trajectories of complete groups of which the sampler takes none.",
        "dropped": "Trajectories that the buffer has dropped, since its start.",
        "dropped_since_batch": "Trajectories dropped since the last batch, with the newest reason in the label text.",
        "dropped_share/": "Share of dropped trajectories in this tenth of response lengths, 1 the shortest; 0 to 1.",
        "dropped_stale": "Trajectories that the buffer has dropped because of their staleness, since its start.",
        "over_age": "Trajectories of the last batch above experience.max_staleness.",
        "response_length/mean": "Mean response of the last batch by task, in tokens.",
        "reward/mean": "Mean reward of the last batch by task.",
        "later_parts": "The first division of the parts of a batch that another shard had not written.",
        "shard": "Shard that reported last.",
        "shards": "Shards of the buffer.",
        "staleness/": "Trajectories of the last batch that were so many versions behind the newest when it was formed.",
        "staleness_at_finish/": "Trajectories of the last batch that were so many versions behind when they finished.",
        "trajectories": "Trajectories of the last batch by task.",
        "unfilled_batches": "How many batches the trajectories dropped since the last batch would have filled.",
    },
    "score": {
        "episode_endings": f"Episodes by how they ended, {_SINCE}.",
        "episode_errors": f"Episodes that failed, {_SINCE}.",
        "episode_turns": f"Turns of the model in episodes, {_SINCE}.",
        "episodes": f"Episodes scored, {_SINCE}.",
        "errors": f"Trajectories with an error by task, the first 128 and other, {_SINCE}.",
        "first_error": "1, with the first error of a task in the label text.",
        "generation_errors": f"Trajectories whose generation failed, {_SINCE}.",
        "heldout_errors": f"Held-out answers with an error, {_SINCE}.",
        "heldout_trajectories": f"Held-out answers scored, {_SINCE}.",
        "reward_errors": f"Trajectories whose reward failed, {_SINCE}.",
        "shard": "Shard that reported last.",
        "trajectories": f"Trajectories scored by task, the first 128 and other, without held-out ones, {_SINCE}.",
    },
    "placement": {"waiting": "Training trajectories that may begin and for which no replica has room."},
    "prompts": {
        "drawn": f"Questions drawn by task, {_SINCE}.",
        "exhausted": "1 when all questions are drawn (prompts.epochs).",
        "prompts": f"Prompts written, {_SINCE}.",
        "refused/": f"Rows refused for this reason, {_SINCE}.",
        "refused_share": "Share of a task's rows that are refused, 0 to 1.",
        "rows": "Rows of all tasks.",
    },
    "steps": {
        "batches": "Batches formed.",
        "bytes": "Bytes written to Kafka.",
        "dropped": "Trajectories dropped by reason.",
        "episode_errors": "Episodes that failed.",
        "finished": "Trajectories finished by reason.",
        "finished_tokens": "Tokens of finished trajectories.",
        "generation_errors": "Trajectories whose generation failed.",
        "heldout_errors": "Held-out answers with an error.",
        "heldout_trajectories": "Held-out answers scored.",
        "moved": "Trajectories moved to another replica by reason.",
        "placed": "Trajectories assigned to a replica by reason.",
        "read": "Records read by topic.",
        "rejected": "Assignments rejected.",
        "refused": "Rows refused by reason.",
        "reward_errors": "Trajectories whose reward failed.",
        "settled": "Trajectories settled by outcome.",
        "time": "Time spent by phase, in seconds.",
        "trajectories": "Trajectories scored, without held-out ones.",
        "written": "Records written by topic.",
    },
}
"""By role, or `steps`: the text of a value, or of all values whose name begins with the key up to its slash."""


def metric_text(stage: str, name: str) -> str:
    """What the value `name` of `stage` is."""
    texts = TEXTS[stage]
    about = texts.get(name) or texts.get(f"{name.partition('/')[0]}/")
    return about or f"{name} of {stage}; docs/evaluation.md and docs/training.md list the metrics."


def counter_text(kind: str) -> str:
    """What the counters `kind` of the steps count; they begin again with each start of a shard."""
    about = TEXTS["steps"].get(kind, f"{kind}.")
    return f"{about.rstrip('.')}, by role and shard, since the start of the shard."
