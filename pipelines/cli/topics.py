"""`laminar topics`: inspect and repair a run's topics."""

from __future__ import annotations

from pipelines.cli.lazy import CommandModule, lazy_group
from pipelines.cli.option_sets import Commands

_METADATA, _TAIL, _FIND = "pipelines.cli.topic_metadata", "pipelines.cli.tail", "pipelines.cli.find"
_TRANSACTIONS = "pipelines.cli.open_transactions"
_REPAIR, _DEAD_LETTERS = "pipelines.cli.repair", "pipelines.cli.dead_letters"
# Commands that read records import Arrow; commands that only query brokers do not.
COMMANDS: dict[str, CommandModule] = {
    "create": CommandModule(_METADATA, "Create a run's topics before its roles start.", "create_command"),
    "list": CommandModule(_METADATA, "List the topics of a run: partitions, offsets, record types.", "list_command"),
    "describe": CommandModule(_METADATA, "Describe a topic: producers, consumers, settings.", "describe_command"),
    "schema": CommandModule("pipelines.cli.topic_schema", "Print the schemas of a topic's records.", "schema_command"),
    "tail": CommandModule(_TAIL, "Print records of a topic, decoded.", "tail_command"),
    "get": CommandModule(_TAIL, "Print one whole record as JSON.", "get_command"),
    "find": CommandModule(_FIND, "Find rows of a topic by their fields.", "find_command"),
    "stats": CommandModule(_FIND, "Count what a topic holds: records, rows, bytes, ranges.", "stats_command"),
    "lag": CommandModule(_METADATA, "Show each pipeline's consumer lag.", "lag_command"),
    "offsets": CommandModule(_METADATA, "Show each partition's first and end offset.", "offsets_command"),
    "replay": CommandModule(_REPAIR, "Publish records again, unchanged. Dry run by default.", "replay_command"),
    "reset": CommandModule(_REPAIR, "Reset a pipeline's committed offsets. Dry run by default.", "reset_command"),
    "transactions": CommandModule(_TRANSACTIONS, "List open transactions that block consumers, and abort them."),
    "dlq": CommandModule(_DEAD_LETTERS, "List dead letters, and replay their records."),
}

app = Commands(cls=lazy_group(COMMANDS), no_args_is_help=True)


@app.callback()
def topics() -> None:
    """Inspect and repair a run's topics.

    \b
    Examples:
      laminar topics list
      laminar topics tail trajectories -n 3
      laminar topics find experiences -w "reward > 0.5" -n 3
      laminar topics lag
    """
