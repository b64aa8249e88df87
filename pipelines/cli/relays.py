"""`laminar relays`: in what order the relays of a run stand, what each holds, and what moves between them."""

from __future__ import annotations

import time

from infra.kafka.reading import last_of_each_key, read_topic
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, Connection, Printing
from pipelines.cli.replicas import BEATS
from pipelines.present.output import Report, Row, RowOutput
from schemas.plain import to_plain
from schemas.records import RelayChain, RelayStatus
from schemas.topics import RELAY_CHAIN, REPLICAS

app = Commands()
COLUMNS = ("place", "relay", "role", "versions", "arriving", "in", "out", "corrupted", "lost", "heard", "address")


@app.command()
def relays(
    address: Address,
    printing: Printing,
) -> Report | RowOutput:
    """Show the chain of relays: its order, what each holds, what arrives and how fast. The first one is the master.

    \b
    Examples:
      laminar relays
      laminar relays --json | jq '.relays[].versions[0]'
      laminar relays -o csv
    """
    to = address.connect()
    chain, said = read_chain(to), read_status(to)
    now = int(time.time() * 1000)
    rows = relay_rows(chain, said, now)
    form = printing.form()
    if form != "json":
        return RowOutput([rows], COLUMNS, form, f"run {to.run} has no relays yet")
    data = {
        "chain": None if chain is None else to_plain(chain),
        "relays": [to_plain(said[row["relay"]]) | {"place": row["place"], "role": row["role"]} for row in rows],
    }
    return Report(data, str, as_json=True)


def read_chain(to: Connection) -> RelayChain | None:
    """The newest chain of a run."""
    rows = [row for record in read_topic(to.client, RELAY_CHAIN.name(to.run)) for row in record.rows]
    return max((row for row in rows if isinstance(row, RelayChain)), key=lambda chain: chain.number, default=None)


def read_status(to: Connection) -> dict[int, RelayStatus]:
    """The last heartbeat of each relay, of the newest heartbeats of a run."""
    rows = (row for record in last_of_each_key(to.client, REPLICAS.name(to.run), BEATS, 0) for row in record.rows)
    return {row.relay: row for row in rows if isinstance(row, RelayStatus)}


def relay_rows(chain: RelayChain | None, said: dict[int, RelayStatus], now: int) -> list[Row]:
    """A row a relay that was heard of, those of the chain first, in its order. `now` is in Unix milliseconds."""
    order = [] if chain is None else [link.relay for link in chain.links]
    rows: list[Row] = []
    for relay in [*(each for each in order if each in said), *sorted(said.keys() - set(order))]:
        status = said[relay]
        joins = chain is not None and relay in chain.joining
        role = "gone" if relay not in order else "master" if relay == order[0] else "joining" if joins else "relay"
        arrived = 100 * status.arrived_bytes // max(1, status.arriving_bytes)
        rows.append(
            {
                "place": order.index(relay) if relay in order else None,
                "relay": relay,
                "role": role,
                "versions": ", ".join(status.versions) or "none",
                "arriving": f"{status.arriving} {arrived} %" if status.arriving else None,
                "in": f"{status.received_per_s / 1e6:.1f} MB/s",
                "out": f"{status.sent_per_s / 1e6:.1f} MB/s",
                "corrupted": status.corrupted_chunks,
                "lost": status.lost_sources,
                "heard": f"{max(0, now - status.sent_at) / 1000:.0f} s ago",
                "address": status.address,
            }
        )
    return rows
