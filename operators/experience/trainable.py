"""What can be trained. One member that cannot would cost its whole batch, which is trained whole or not at all."""

from __future__ import annotations

import math

import numpy as np

from schemas.records import Experience


def untrainable(experience: Experience) -> str | None:
    """Why `experience` cannot be trained; None if it can."""
    trajectory = experience.trajectory
    response, count = trajectory.response, len(trajectory.response.token_ids)
    if trajectory.finish_reason == "failed":
        return trajectory.error or experience.error or "generation failed"
    if not count or not trajectory.version_spans:
        return "nothing was generated"
    if not len(trajectory.prompt.token_ids):
        return "the prompt is empty"
    if len(response.logprobs) != count or len(response.loss_mask) != count:
        return f"{count} tokens with {len(response.logprobs)} logprobs and a mask of {len(response.loss_mask)}"
    if not math.isfinite(experience.reward):
        return f"the reward is {experience.reward}"
    trained = response.loss_mask.to_numpy(zero_copy_only=False)
    if not np.isfinite(response.logprobs.to_numpy(zero_copy_only=False)[trained]).all():
        return "a behaviour logprob is not finite"
    return None
