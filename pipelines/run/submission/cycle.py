"""Draws the whole cycle: the steps of every role, the topics between them, and repack as a re-partitioning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipelines.run.submission.outline import GraphStep
from pipelines.run.submission.shapes import Box, arrow, document, text

WIDTH, GAP, TOP, INBOXES = 260, 70, 60, 3
HEAD = 22
"""Room above a role's boxes for its name."""
COLUMNS = (
    ("prompts", "evaluation"),
    ("placement", ""),
    ("", "relay"),
    ("rollout", "trainer"),
    ("score", "experience"),
)
"""The roles of each column, above and below. The third has the partitions of `inbox` above."""
EDGES = {
    ("prompts", "placement"): ("prompts",),
    ("evaluation", "placement"): ("eval-prompts",),
    ("placement", "rollout"): ("inbox",),
    ("rollout", "placement"): ("progress", "replicas"),
    ("rollout", "score"): ("trajectories",),
    ("score", "experience"): ("experiences",),
    ("score", "evaluation"): ("experiences",),
    ("experience", "placement"): ("settled",),
    ("experience", "trainer"): ("batches",),
    ("trainer", "relay"): ("relay",),
}
"""The topics of the arrow from a role to another. Weights go from relays to rollouts through no topic."""


def cycle_svg(steps: Mapping[str, Sequence[GraphStep]]) -> str:
    """The drawing of the roles with `steps`."""
    roles = _role_boxes(steps)
    inboxes = _inbox_boxes(roles["placement"])
    parts = [box.svg() for boxes in (*roles.values(), inboxes) for box in boxes]
    parts += [text(boxes[0].x, boxes[0].y - 8, role) for role, boxes in roles.items()]
    parts += [*_inbox_arrows(roles, inboxes), *_row_arrows(roles), *_lane_arrows(roles)]
    height = max(boxes[-1].bottom for boxes in roles.values()) + TOP
    return document("the cycle of a run", _x(len(COLUMNS)), height, parts)


def _role_boxes(steps: Mapping[str, Sequence[GraphStep]]) -> dict[str, list[Box]]:
    """The boxes of each role; the lower row begins below the tallest role of the upper one."""
    above = {role: _column(steps[role], _x(at), TOP) for at, (role, _) in enumerate(COLUMNS) if role}
    lower = max(boxes[-1].bottom for boxes in above.values()) + 2 * TOP
    below = {role: _column(steps[role], _x(at), lower) for at, (_, role) in enumerate(COLUMNS) if role}
    return {**above, **below}


def _column(steps: Sequence[GraphStep], x: int, y: int) -> list[Box]:
    boxes: list[Box] = []
    for step in steps:
        lines = step.phases or tuple(f"→ {topic}" for topic in step.topics)
        boxes.append(Box(x, y, WIDTH, step.name, lines, "map" if step.topics else "step"))
        y = boxes[-1].bottom + 6
    return boxes


def _inbox_boxes(placement: Sequence[Box]) -> list[Box]:
    """The first partitions of `inbox`, at the height of placement's last steps."""
    top = placement[0].y
    lines = "partition of replica {}"
    return [
        Box(_x(2) + 20, top + at * 60, WIDTH - 40, f"inbox {at}", (lines.format(at),), "topic") for at in range(INBOXES)
    ]


def _inbox_arrows(roles: Mapping[str, Sequence[Box]], inboxes: Sequence[Box]) -> list[str]:
    """Dispatch by placement, and the hand-over of a moved trajectory to the partition of another replica."""
    repartition, hand_over = (_step(roles[role], "map", "inbox") for role in ("placement", "rollout"))
    accepts, moved = roles["rollout"][0], inboxes[-1]
    parts = []
    for at, inbox in enumerate(inboxes):
        parts.append(arrow((repartition.right, repartition.middle), (inbox.x, inbox.middle)))
        parts.append(arrow((inbox.right, inbox.middle - 6), (accepts.x, accepts.middle + 4 * at)))
    parts.append(arrow((hand_over.x, hand_over.middle), (moved.right, moved.middle + 8), kind="repack"))
    parts.append(text(moved.x, moved.bottom + 18, "repack: a hand-over moves the", small=True))
    parts.append(text(moved.x, moved.bottom + 32, "trajectory to another partition", small=True))
    return parts


def _row_arrows(roles: Mapping[str, Sequence[Box]]) -> list[str]:
    """The topics between neighbours of a row."""
    parts = []
    for source, to in (("prompts", "placement"), ("rollout", "score"), ("experience", "trainer"), ("trainer", "relay")):
        last, first = roles[source][-1], roles[to][0]
        back = first.x < last.x
        begin, end = (last.x, first.right) if back else (last.right, first.x)
        middle = (begin + end) // 2
        parts.append(arrow((begin, last.middle), (middle, last.middle), (middle, first.middle), (end, first.middle)))
        parts.append(text(min(begin, end) + 6, first.middle - 6, _label(source, to), small=True))
    return parts


def _lane_arrows(roles: Mapping[str, Sequence[Box]]) -> list[str]:
    """The topics between rows, through the lane between them, and from the rollout back to placement above all."""
    placement, rollout, score, relay = (roles[role] for role in ("placement", "rollout", "score", "relay"))
    experience, evaluation = roles["experience"], roles["evaluation"]
    tracks, lane, top = placement[0], relay[0].y - TOP, TOP // 3
    lower = relay[0].y - HEAD
    finished = (rollout[0].centre, rollout[0].y - 4)
    parts = [
        arrow(finished, (finished[0], top), (tracks.centre, top), (tracks.centre, tracks.y)),
        text(_x(2) + 10, top - 5, _label("rollout", "placement"), small=True),
        arrow((score[-1].centre, score[-1].bottom), (score[-1].centre, lower)),
        text(score[-1].centre + 6, lane, _label("score", "experience"), small=True),
    ]
    settled, back = experience[0].x + 30, placement[-1].centre + 30
    parts.append(arrow((settled, lower), (settled, lane), (back, lane), (back, placement[-1].bottom)))
    parts.append(text(back + 10, lane - 6, _label("experience", "placement"), small=True))
    weights, loads = relay[0].right - 20, rollout[-1].x + 60
    parts.append(arrow((weights, lower), (weights, lane + 20), (loads, lane + 20), (loads, rollout[-1].bottom)))
    parts.append(text(weights + 10, lane + 34, "weights, in shared memory", small=True))
    asks, up = evaluation[0], placement[-1].centre - 30
    parts.append(arrow((asks.right, asks.middle), (up, asks.middle), (up, placement[-1].bottom)))
    parts.append(text(asks.right + 6, asks.middle - 6, _label("evaluation", "placement"), small=True))
    begin, low = score[-1], evaluation[-1].bottom + HEAD
    beside = begin.right + HEAD
    corners = ((beside, begin.middle), (beside, low), (evaluation[-1].centre, low))
    parts.append(arrow((begin.right, begin.middle), *corners, (evaluation[-1].centre, evaluation[-1].bottom)))
    parts.append(text(evaluation[-1].centre + 10, low - 6, _label("score", "evaluation"), small=True))
    return parts


def _step(boxes: Sequence[Box], kind: str, topic: str) -> Box:
    """The map among `boxes` that writes `topic`."""
    return next(box for box in boxes if box.kind == kind and f"→ {topic}" in box.lines)


def _label(source: str, to: str) -> str:
    return ", ".join(EDGES[source, to])


def _x(column: int) -> int:
    return GAP // 2 + column * (WIDTH + GAP)
