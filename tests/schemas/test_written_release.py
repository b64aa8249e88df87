"""Records for the roles of an older release: they lack what it does not know, or are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from record_samples import SAMPLES

from schemas import records
from schemas.block import Block
from schemas.block_codec import encode_block
from schemas.codec import decode, encode, is_read
from schemas.record_versions import INFORMATION, VERSIONS, version_in
from schemas.release import FIRST, NEWEST, NewerRelease, NotInRelease, release_numbers, write_for, written_release


@pytest.fixture
def first_release() -> Iterator[None]:
    """Records are written for roles of 0.2.0."""
    write_for(FIRST)
    yield
    write_for(NEWEST)


PLAIN = replace(SAMPLES[records.Trajectory], conversations=(), conversation_rewards=())


@pytest.mark.usefixtures("first_release")
def test_records_lack_what_the_release_does_not_know() -> None:
    assert written_release() == FIRST
    (decoded,) = decode(*encode(PLAIN))
    assert dict(encode(PLAIN)[1])["laminar-schema"] == b"Trajectory/2"
    prompt = replace(PLAIN.prompt, messages=())
    assert decoded == replace(PLAIN, token_sampler=None, prompt=prompt)
    status = SAMPLES[records.ReplicaStatus]
    assert decode(*encode(status)) == [replace(status, first_incarnation=0, kv_address="", unreachable=())]
    (value, headers), *_ = encode_block(Block.of([PLAIN, PLAIN]))
    assert decode(value, headers) == [decoded, decoded]


@pytest.mark.usefixtures("first_release")
def test_record_that_needs_a_newer_field_is_refused() -> None:
    for kind, field in [(records.Trajectory, "conversations"), (records.MicroBatch, "breaks")]:
        with pytest.raises(NotInRelease, match=rf"release 0\.2\.0 has no {kind.__name__}\.{field}, .*runs upgrade"):
            encode(SAMPLES[kind])


@pytest.mark.usefixtures("first_release")
def test_record_on_a_topic_of_older_roles_is_refused() -> None:
    assert {kind for kind in SAMPLES if not is_read(kind)} == {
        *(records.TurnRequest, records.EpisodeEnd, records.TurnEnded),
        *(records.StageGroup, records.GroupPlan, records.StageStatus, records.RelayArrival),
    }
    with pytest.raises(NotInRelease, match=r"release 0\.2\.0 has no record StageGroup"):
        encode(SAMPLES[records.StageGroup])
    assert decode(*encode(SAMPLES[records.RankAddress])) == [SAMPLES[records.RankAddress]]


def test_newest_release_writes_the_newest_versions() -> None:
    assert written_release() == NEWEST
    for kind, sample in SAMPLES.items():
        assert version_in(kind, NEWEST) == VERSIONS.get(kind, 2)
        assert dict(encode(sample)[1])["laminar-schema"].endswith(b"/%d" % VERSIONS.get(kind, 2))


def test_process_rejects_records_of_a_later_release() -> None:
    major, minor, _ = release_numbers(NEWEST)
    with pytest.raises(NewerRelease, match="install"):
        write_for(f"{major}.{minor + 1}.0")
    with pytest.raises(ValueError, match="is not a release"):
        write_for("latest")
    assert written_release() == NEWEST


def test_only_known_fields_are_left_out() -> None:
    from schemas.record_versions import ADDED

    assert {field for fields in ADDED.values() for field in fields} > INFORMATION
