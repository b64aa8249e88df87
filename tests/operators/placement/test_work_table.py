"""WorkTable: it equals a plain reference model under any operations."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from record_factories import prompt

from operators.placement.work_table import Owned, Owner, Work, WorkTable

NAMES = [(number, member, purpose) for number in range(3) for member in range(2) for purpose in ("train", "evaluation")]
ACTIONS = st.tuples(
    st.sampled_from(["assign", "assign", "lose", "finish", "release"]), st.sampled_from(NAMES), st.integers(0, 2)
)


@given(st.lists(ACTIONS, max_size=60))
@settings(max_examples=150, deadline=None)
def test_work_table_equals_a_reference_model(actions: list[tuple[str, tuple[int, int, str], int]]) -> None:
    table = WorkTable()
    reference: dict[str, tuple[str, Owned]] = {}
    for emission, (what, (number, member, purpose), replica) in enumerate(actions):
        work = Work(prompt(number, 2, purpose=purpose), member, lease=emission, attempt=1)
        name = work.trajectory_id
        state, entry = reference.get(name, ("", None))
        if what == "assign":
            owned = Owned(work, replica, 1, emission)
            table.assign(owned)
            reference[name] = ("owned", owned)
        elif what == "lose":
            table.lose(name)
            if entry is not None:
                reference[name] = ("lost", entry)
        elif what == "finish":
            assert table.finish(name) is (entry if state == "owned" else None)
            if entry is not None:
                reference[name] = ("finished", entry)
        else:
            table.release(name)
            reference.pop(name, None)
    by_state = {
        state: {n: e for n, (s, e) in reference.items() if s == state} for state in ("owned", "lost", "finished")
    }
    assert sorted(table.names()) == sorted(reference)
    assert all(name in table for name in reference)
    assert table.outstanding_training == sum(name.startswith("p") for name in reference)
    assert table.oldest_emission() == min((entry.emission for _, entry in reference.values()), default=None)
    assert set(table.owners()) == {entry.owner for entry in by_state["owned"].values()}
    for replica in range(3):
        owned = [entry for entry in by_state["owned"].values() if entry.replica == replica]
        assert table.load(Owner(replica, 1)) == len(owned)
        orphans = table.orphans(lambda owner, replica=replica: owner.replica == replica)
        assert orphans == sorted(owned, key=lambda entry: entry.work.lease)
    for purpose in ("train", "evaluation"):
        lost = [entry for entry in by_state["lost"].values() if entry.work.prompt.purpose == purpose]
        assert sorted(table.lost(purpose), key=id) == sorted(lost, key=id)
    for name in ("p0.0", "e2.1"):
        assert table.owned(name) is by_state["owned"].get(name)
        assert table.unfinished(name) is (by_state["owned"] | by_state["lost"]).get(name)
