"""`laminar topics`: what stands in a run's topics, and how far its pipelines are behind."""

from __future__ import annotations

from pipelines.cli.lazy import CommandModule, lazy_group
from pipelines.cli.option_sets import Commands

_FACTS, _TAIL, _FIND = "pipelines.cli.topic_metadata", "pipelines.cli.tail", "pipelines.cli.find"
_OPEN = "pipelines.cli.open_transactions"
_REPAIR, _DEAD = "pipelines.cli.repair", "pipelines.cli.dead_letters"
# What reads records imports Arrow, what asks brokers does not.
COMMANDS: dict[str, CommandModule] = {
    "list": CommandModule(_FACTS, "List the topics of a run: partitions, offsets held, records.", "list_command"),
    "describe": CommandModule(_FACTS, "Describe a topic: who writes and reads it, its settings.", "describe_command"),
    "tail": CommandModule(_TAIL, "Print records of a topic, decoded, and those that cannot be.", "tail_command"),
    "get": CommandModule(_TAIL, "Print one record whole, as JSON.", "get_command"),
    "find": CommandModule(_FIND, "Find rows of a topic by their fields.", "find_command"),
    "stats": CommandModule(_FIND, "Count what a topic holds: records, rows, bytes, ranges.", "stats_command"),
    "lag": CommandModule(_FACTS, "Say how far each pipeline of a run is behind.", "lag_command"),
    "offsets": CommandModule(_FACTS, "Say where each partition begins and ends.", "offsets_command"),
    "replay": CommandModule(_REPAIR, "Write records again, as they are. A dry run unless told to.", "replay_command"),
    "reset": CommandModule(_REPAIR, "Let a pipeline read on elsewhere. A dry run unless told to.", "reset_command"),
    "transactions": CommandModule(_OPEN, "List transactions that hold readers back, and end them."),
    "dlq": CommandModule(_DEAD, "Look at dead letters, and send their records back."),
}

app = Commands(cls=lazy_group(COMMANDS), no_args_is_help=True)


@app.callback()
def topics() -> None:
    """Look into a run's topics.

    \b
    Examples:
      laminar topics list
      laminar topics tail trajectories -n 3
      laminar topics find experiences -w "reward > 0.5" -n 3
      laminar topics lag
    """
