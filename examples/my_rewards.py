"""Your own reward, configured as `my_rewards.py:shows_work` in this folder.

A reward function may take any of these arguments: `text` (the response), `answer` (extracted from the response as
configured, None if there is none), `reference` (a dictionary whose `answer` is the correct one), `prompt`, `task`,
`tokens` (the response's length), and its options. It returns a finite number. It runs in a separate process with limits
on time and memory. If it raises or hangs, the trajectory gets the configured reward and an error instead.
"""


def shows_work(text: str, answer: str | None, steps: int = 2) -> float:
    """The share of `steps` steps before the answer, at most 1. Steps are separated by ";" or newlines."""
    if answer is None:
        return 0.0
    working = text.removesuffix(answer).replace("\n", ";").split(";")
    return min(1.0, sum(bool(step.strip("# ")) for step in working) / steps)
