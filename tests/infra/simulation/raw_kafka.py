"""A real broker behind the interface of SimulatedCluster: each method sends one request, nothing is repeated."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kafka import KafkaAdminClient, TopicPartition, errors
from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
    TxnOffsetCommitRequest,
)
from kafka.record.memory_records import MemoryRecordsBuilder

from infra.simulation import errors as simulated
from infra.simulation.cluster import Place
from infra.simulation.partition import ProducerKey

NAMES = {
    errors.InvalidProducerEpochError: simulated.InvalidProducerEpoch,
    errors.ProducerFencedError: simulated.ProducerFenced,
    errors.InvalidProducerIdMappingError: simulated.InvalidProducerIdMapping,
    errors.InvalidTxnStateError: simulated.InvalidTransactionState,
    errors.OutOfOrderSequenceNumberError: simulated.OutOfOrderSequence,
    errors.OffsetOutOfRangeError: simulated.OffsetOutOfRange,
}
_RETRIED = (
    errors.ConcurrentTransactionsError,
    errors.CoordinatorLoadInProgressError,
    errors.CoordinatorNotAvailableError,
    errors.NotCoordinatorError,
    errors.NotEnoughReplicasError,
    errors.NotLeaderForPartitionError,
    errors.UnknownTopicOrPartitionError,
)
_PREPARED = ("PrepareCommit", "PrepareAbort", "PrepareEpochFence")


class RawKafka:
    """One broker. Responses that ask for a retry are retried: they say that an earlier request is still at work."""

    def __init__(self, client: KafkaAdminClient) -> None:
        self._client = client
        self._node = client.describe_cluster()["brokers"][0]["broker_id"]

    def init_producer_id(self, transactional_id: str, timeout_s: float = 60.0) -> ProducerKey:
        self._find(CoordinatorType.TRANSACTION, transactional_id)

        def request() -> Any:
            response = self._send(
                InitProducerIdRequest(
                    transactional_id=transactional_id,
                    transaction_timeout_ms=int(timeout_s * 1000),
                    producer_id=-1,
                    producer_epoch=-1,
                    max_version=4,
                )
            )
            return response, [response.error_code]

        response = self._retried(request)
        self._settle(transactional_id)
        return ProducerKey(response.producer_id, response.producer_epoch)

    def add_partitions(self, transactional_id: str, producer: ProducerKey, places: Iterable[Place]) -> None:
        by_topic: dict[str, list[int]] = {}
        for place in places:
            by_topic.setdefault(place.topic, []).append(place.partition)
        topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic

        def request() -> Any:
            response = self._send(
                AddPartitionsToTxnRequest(
                    v3_and_below_transactional_id=transactional_id,
                    v3_and_below_producer_id=producer.producer_id,
                    v3_and_below_producer_epoch=producer.epoch,
                    v3_and_below_topics=[topic(name=name, partitions=numbers) for name, numbers in by_topic.items()],
                    max_version=3,
                )
            )
            return response, [code for _, rows in response.results_by_topic_v3_and_below for _, code in rows]

        self._retried(request)

    def add_offsets(self, transactional_id: str, producer: ProducerKey, group: str) -> None:
        self._coordinate(AddOffsetsToTxnRequest, transactional_id, producer, group_id=group)

    def produce(
        self, place: Place, values: Sequence[bytes], producer: ProducerKey, transactional_id: str, sequence: int
    ) -> int:
        return self._produce(place, values, transactional_id, _records(values, producer, sequence))

    def send(self, place: Place, values: Sequence[bytes]) -> int:
        return self._produce(place, values, None, _records(values, None, 0))

    def commit_offsets(
        self, transactional_id: str, group: str, producer: ProducerKey, offsets: Mapping[Place, int]
    ) -> None:
        self._find(CoordinatorType.GROUP, group)
        topic = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
        partition = topic.TxnOffsetCommitRequestPartition

        def request() -> Any:
            response = self._send(
                TxnOffsetCommitRequest(
                    transactional_id=transactional_id,
                    group_id=group,
                    producer_id=producer.producer_id,
                    producer_epoch=producer.epoch,
                    generation_id=-1,
                    member_id="",
                    group_instance_id=None,
                    topics=[
                        topic(
                            name=place.topic,
                            partitions=[
                                partition(
                                    partition_index=place.partition,
                                    committed_offset=offset,
                                    committed_leader_epoch=-1,
                                    committed_metadata="",
                                )
                            ],
                        )
                        for place, offset in offsets.items()
                    ],
                    max_version=3,
                )
            )
            return response, [code for _, rows in response.topics for _, code in rows]

        self._retried(request)

    def _coordinate(self, kind: type, transactional_id: str, producer: ProducerKey, **fields: Any) -> None:
        """Send a request of `kind` to the coordinator of the transaction."""

        def request() -> Any:
            response = self._send(
                kind(
                    transactional_id=transactional_id,
                    producer_id=producer.producer_id,
                    producer_epoch=producer.epoch,
                    max_version=3,
                    **fields,
                )
            )
            return response, [response.error_code]

        self._retried(request)

    def end_transaction(self, transactional_id: str, producer: ProducerKey, *, commit: bool) -> None:
        self._coordinate(EndTxnRequest, transactional_id, producer, committed=commit)
        self._settle(transactional_id)

    def committed_offsets(self, group: str) -> Mapping[Place, int]:
        found = self._client.list_group_offsets(group)[group]
        return {Place(*place): each.offset for place, each in found.items() if each.offset >= 0}

    def delete_before(self, place: Place, offset: int) -> None:
        try:
            self._client.delete_records({TopicPartition(*place): offset})
        except errors.KafkaError as error:
            raise _simulated(error) from error

    def _produce(self, place: Place, values: Sequence[bytes], transactional_id: str | None, records: bytes) -> int:
        topic = ProduceRequest.TopicProduceData

        def request() -> Any:
            response = self._send(
                ProduceRequest(
                    transactional_id=transactional_id,
                    acks=-1,
                    timeout_ms=10_000,
                    topic_data=[
                        topic(
                            name=place.topic,
                            partition_data=[topic.PartitionProduceData(index=place.partition, records=records)],
                        )
                    ],
                    max_version=9,
                )
            )
            row = response.responses[0].partition_responses[0]
            return row.base_offset, [row.error_code]

        return int(self._retried(request))

    def _find(self, kind: CoordinatorType, key: str) -> None:
        """Look the coordinator up, which creates the internal topic at the first time."""

        def request() -> Any:
            response = self._send(FindCoordinatorRequest(key=key, key_type=kind.value, max_version=3))
            return response, [response.error_code]

        self._retried(request)

    def _settle(self, transactional_id: str) -> None:
        """Wait until the markers of the transaction are written."""
        while self._client.describe_transactions([transactional_id])[transactional_id].state.value in _PREPARED:
            time.sleep(0.002)

    def _send(self, request: Any) -> Any:
        return self._client._manager.run(lambda: self._client._manager.send(request, node_id=self._node))

    def _retried(self, request: Any) -> Any:
        """The response of `request`, repeated while it must be; an error code is raised by its simulated name."""
        deadline = time.monotonic() + 30.0
        while True:
            response, codes = request()
            failed = [errors.for_code(code) for code in codes if code]
            if not failed:
                return response
            if failed[0] not in _RETRIED or time.monotonic() > deadline:
                raise _simulated(failed[0]())
            time.sleep(0.005)


def _simulated(error: errors.KafkaError) -> Exception:
    name = NAMES.get(type(error))
    return error if name is None else name(str(error))


def _records(values: Sequence[bytes], producer: ProducerKey | None, sequence: int) -> bytes:
    state = (
        {}
        if producer is None
        else {
            "transactional": True,
            "producer_id": producer.producer_id,
            "producer_epoch": producer.epoch,
            "base_sequence": sequence,
        }
    )
    builder = MemoryRecordsBuilder(2, 0, 1 << 20, **state)
    for value in values:
        builder.append(int(time.time() * 1000), None, value)
    builder.close()
    return bytes(builder.buffer())
