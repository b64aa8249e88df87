"""Heartbeats start before the engines, survive Kafka failures, and report the stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from record_factories import version
from scripted_engine import ScriptedEngine, ScriptedWeights
from waiting import until

from infra.kafka.producer import DeliveryFailed
from infra.transport.endpoint import Endpoint
from infra.transport.frames import PeerUnreachable
from infra.transport.kv_transfer import KVTransfers
from operators.rollout.agent_episodes import AgentEngine
from operators.rollout.episodes import EpisodeEngine
from operators.rollout.heartbeats import Heartbeats
from operators.rollout.replica import Replica
from schemas.codec import decode
from schemas.records import KVManifest, Metric, ReplicaStatus


class Producer:
    """Records the messages; raises the next of `failures` instead."""

    def __init__(self) -> None:
        self.sent: list[ReplicaStatus] = []
        self.metrics: list[Metric] = []
        self.keys: set[bytes] = set()
        self.failures: list[Exception] = []
        self.closed = False
        self.arrived = threading.Condition()

    def send(self, topic: str, value: bytes, *, key: bytes, headers: Sequence[tuple[str, bytes]]) -> None:
        with self.arrived:
            if self.failures:
                raise self.failures.pop()
            if topic == "laminar.r.metrics":
                self.metrics += decode(value, headers)
                return
            assert topic == "laminar.r.replicas"
            self.keys.add(key)
            self.sent += decode(value, headers)
            self.arrived.notify_all()

    def close(self, timeout_s: float) -> None:
        self.closed = True
        if self.failures:
            raise self.failures.pop()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.arrived:
            assert self.arrived.wait_for(condition, 60.0), [status.state for status in self.sent]


@pytest.fixture
def producer() -> Producer:
    return Producer()


@pytest.fixture
def beats(producer: Producer) -> Iterator[Heartbeats]:
    heartbeats = Heartbeats(producer, "r", 1, range(2, 4), 9, period_s=60.0)  # type: ignore[arg-type]
    yield heartbeats
    heartbeats.close()


def replicas() -> list[Replica]:
    weights = ScriptedWeights()
    weights.add(version(0))
    made = [Replica(index, 9, ScriptedEngine(slots=5), weights, str, lambda: 0) for index in (2, 3)]
    for replica in made:
        replica.announce(version(0))
        replica.step()
    return made


def test_heartbeats_start_before_the_engines(producer: Producer, beats: Heartbeats) -> None:
    producer.wait_for(lambda: len(producer.sent) >= 2)
    assert [(s.replica, s.process, s.incarnation, s.state, s.capacity) for s in producer.sent] == [
        (2, 1, 9, "starting", 0),
        (3, 1, 9, "starting", 0),
    ]
    assert producer.keys == {b"rollout-2", b"rollout-3"}


def test_heartbeats_report_replicas_and_send_at_once(producer: Producer, beats: Heartbeats) -> None:
    with beats.step():
        time.sleep(0.002)
    took = beats.step_seconds
    producer.wait_for(lambda: len(producer.sent) >= 2)
    beats.set_replicas(replicas())
    producer.wait_for(lambda: len(producer.sent) >= 4)
    status = producer.sent[-1]
    assert (status.replica, status.state, status.policy_version, status.capacity) == (3, "running", version(0), 5)
    assert status.step_seconds == took >= 0.002
    beats.send_now()
    producer.wait_for(lambda: len(producer.sent) >= 6)


def test_heartbeats_include_the_usage_metric(producer: Producer) -> None:
    beats = Heartbeats(producer, "r", 1, range(2, 4), 9, period_s=0.01)  # type: ignore[arg-type]
    beats.set_replicas(replicas())
    producer.wait_for(lambda: bool(producer.metrics) and "rollout/idle_ratio" in producer.metrics[-1].values)
    reported = producer.metrics[-1]
    assert (reported.name, reported.step) == ("rollout", 1)
    assert 0 <= reported.values["cpu/model_seconds"] <= reported.values["cpu/process_seconds"]
    assert reported.values["rollout/busy_seconds"] == 0.0
    assert reported.values["rollout/idle_ratio"] == 1.0
    assert (reported.values["kv/reused"], reported.values["kv/recomputed"]) == (0, 0)
    beats.close()


def test_heartbeat_has_kv_address_and_those_that_failed(producer: Producer, beats: Heartbeats) -> None:
    transfers = KVTransfers("r", Endpoint(token="a-token-of-the-tests"), 1000)
    lost = KVManifest("127.0.0.1:1", "name", version(0), 3, 8, 8, (0,))
    with pytest.raises(PeerUnreachable):
        transfers.fetch_now(lost)
    replica = Replica(2, 9, ScriptedEngine(slots=5), ScriptedWeights(), str, lambda: 0, kv_transfers=transfers)
    beats.set_replicas([replica])
    producer.wait_for(lambda: producer.sent[-1:] != [] and producer.sent[-1].kv_address != "")
    assert (producer.sent[-1].kv_address, producer.sent[-1].unreachable) == (transfers.address, ("127.0.0.1:1",))
    transfers.close()


def test_usage_metric_is_sent_once_a_period_and_at_the_end(producer: Producer, beats: Heartbeats) -> None:
    """A status that is sent at once, such as after each weight load, has no metric with it."""
    producer.wait_for(lambda: len(producer.sent) >= 2)
    beats.set_replicas(replicas())
    producer.wait_for(lambda: len(producer.sent) >= 4)
    beats.send_now()
    producer.wait_for(lambda: len(producer.sent) >= 6)
    beats.stop()
    assert len(producer.metrics) == 1
    beats.close()
    assert len(producer.metrics) == 2


def test_heartbeats_end_a_process_whose_step_times_out(producer: Producer) -> None:
    ended = threading.Event()
    beats = Heartbeats(
        producer,  # type: ignore[arg-type]
        "r",
        1,
        range(2, 4),
        9,
        period_s=0.001,
        step_timeout_s=0.01,
        end=ended.set,
    )
    with beats.step():
        assert ended.wait(60)
        assert beats.step_seconds > 0.01  # reported while the step runs
    beats.close()


@pytest.mark.parametrize("failure", [DeliveryFailed("gone"), TimeoutError("slow")])
def test_heartbeats_continue_after_delivery_failures(producer: Producer, beats: Heartbeats, failure: Exception) -> None:
    producer.wait_for(lambda: len(producer.sent) >= 2)
    producer.failures = [failure]
    beats.send_now()
    until(lambda: not producer.failures)
    beats.send_now()
    producer.wait_for(lambda: len(producer.sent) >= 4)


@pytest.mark.parametrize("failure", [None, DeliveryFailed("gone"), TimeoutError("slow")])
def test_heartbeats_report_stopped_at_close(producer: Producer, failure: Exception | None) -> None:
    beats = Heartbeats(producer, "r", 1, range(2, 4), 9, period_s=60.0)  # type: ignore[arg-type]
    producer.wait_for(lambda: len(producer.sent) >= 2)
    beats.set_replicas(replicas())
    producer.wait_for(lambda: len(producer.sent) >= 4)
    producer.close = _raising(failure) if failure else producer.close  # type: ignore[method-assign]
    beats.close()
    assert [status.state for status in producer.sent[-2:]] == ["stopped", "stopped"]
    assert not beats._thread.is_alive()


def _raising(error: Exception) -> Callable[..., None]:
    def close(timeout_s: float) -> None:
        raise error

    return close


@pytest.mark.parametrize("agents", [False, True])
def test_load_is_read_while_episodes_start(agents: bool) -> None:
    """The engine steps in another thread than that of the heartbeats."""
    episodes = EpisodeEngine(ScriptedEngine(), {}, lambda text: [], str)
    engine = AgentEngine(episodes) if agents else episodes

    class Starting:
        @property
        def turn(self) -> None:
            engine._active[f"p{len(engine._active)}.0"] = self  # type: ignore[assignment]

        reply = turn

    engine._active["p0.0"] = Starting()  # type: ignore[assignment]
    assert engine.status().running == agents
