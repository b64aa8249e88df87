"""`laminar relays`: a run's relay chain, the versions of each relay, and the transfers between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infra.clocks import wall_ms
from infra.kafka.topic_reader import last_of_each_key, read_rows
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, Printing, RunClient
from pipelines.cli.replicas import MAX_HEARTBEATS
from pipelines.present.output import Report, Row, RowOutput
from schemas.plain import to_plain
from schemas.records import RelayChain, RelayStatus
from schemas.topics import RELAY_CHAIN, REPLICAS

app = Commands()
COLUMNS = (
    "position",
    "relay",
    "role",
    "versions",
    "receiving",
    "in",
    "out",
    "corrupted_chunks",
    "lost_sources",
    "heartbeat",
    "address",
    "reported_by",
)


@app.command()
def relays(address: Address, printing: Printing) -> Report | RowOutput:
    """Show the relay chain in order: each relay's versions, transfer in progress, and rates. The first is the master.
    Column reported_by: the relays that cannot connect to its address.

    \b
    Examples:
      laminar relays
      laminar relays --json | jq '.relays[].versions[0]'
      laminar relays -O csv
    """
    connection = address.open_log()
    chain, statuses = read_chain(connection), read_status(connection)
    now = wall_ms()
    rows = relay_rows(chain, statuses, now)
    form = printing.form()
    if form != "json":
        return RowOutput([rows], COLUMNS, form, f"run {connection.run} has no relays yet")
    data = {
        "chain": None if chain is None else to_plain(chain),
        "relays": [
            to_plain(statuses[row["relay"]]) | {key: row[key] for key in ("position", "role", "reported_by")}
            for row in rows
        ],
    }
    return Report(data, str, as_json=True)


def read_chain(connection: RunClient) -> RelayChain | None:
    """Return the newest relay chain of a run; None if there is none."""
    chains = read_rows(connection.client, RELAY_CHAIN.name(connection.run), RelayChain)
    return max(chains, key=lambda chain: chain.number, default=None)


def read_status(connection: RunClient) -> dict[int, RelayStatus]:
    """Return the last heartbeat of each relay, among the newest `MAX_HEARTBEATS` of the run."""
    records = last_of_each_key(connection.client, REPLICAS.name(connection.run), MAX_HEARTBEATS, 0)
    rows = (row for record in records for row in record.rows)
    return {row.relay: row for row in rows if isinstance(row, RelayStatus)}


def relay_rows(chain: RelayChain | None, statuses: dict[int, RelayStatus], now: int) -> list[Row]:
    """Return a row for each relay with a heartbeat, those of the chain first, in order. `now`: Unix milliseconds."""
    order = [] if chain is None else [link.relay for link in chain.links]
    rows: list[Row] = []
    for relay in [*(each for each in order if each in statuses), *sorted(statuses.keys() - set(order))]:
        status = statuses[relay]
        joins = chain is not None and relay in chain.joining
        role = _role(relay, status, order, statuses.values(), joins)
        arrived = 100 * status.arrived_bytes // max(1, status.arriving_bytes)
        rows.append(
            {
                "position": order.index(relay) if relay in order else None,
                "relay": relay,
                "role": role,
                "versions": ", ".join(status.versions) or "none",
                "receiving": f"{status.arriving} {arrived} %" if status.arriving else None,
                "in": f"{status.received_per_s / 1e6:.1f} MB/s",
                "out": f"{status.sent_per_s / 1e6:.1f} MB/s",
                "corrupted_chunks": status.corrupted_chunks,
                "lost_sources": status.lost_sources,
                "heartbeat": f"{max(0, now - status.sent_at) / 1000:.0f} s ago",
                "address": status.address,
                "reported_by": ", ".join(_reporters(status, statuses.values())) or None,
            }
        )
    return rows


def _role(relay: int, status: RelayStatus, order: Sequence[int], others: Iterable[RelayStatus], joins: bool) -> str:
    if relay in order:
        return "master" if relay == order[0] else "joining" if joins else "relay"
    return "unreachable" if _reporters(status, others) else "gone"


def _reporters(status: RelayStatus, others: Iterable[RelayStatus]) -> list[str]:
    """The relays, with their machines, that cannot connect to the address in `status`."""
    return [f"{other.relay} of {other.host}" for other in others if status.address in other.unreachable]
