"""A reward of your own, named in a configuration as `examples/my_rewards.py:shows_work`.

A reward function takes whichever it wants of `text` (the response), `answer` (what the configuration says is the
answer in it, None if there is none), `reference` (a dictionary; its `answer` is the right one), `prompt`, `task` and
`tokens` (the response's length), and its options; it returns a finite number. It runs in a process of its own, with
limits on time and memory: if it raises or hangs, that trajectory gets the configured reward and an error instead.
"""


def shows_work(text: str, answer: str | None, steps: int = 2) -> float:
    """How much working stands before the answer: 1 from `steps` steps on (";" or newlines separate them), else less."""
    if answer is None:
        return 0.0
    working = text.removesuffix(answer).replace("\n", ";").split(";")
    return min(1.0, sum(bool(step.strip("# ")) for step in working) / steps)
