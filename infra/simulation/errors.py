"""The errors with which a broker responds, by the names of the protocol."""

from __future__ import annotations


class BrokerError(Exception):
    """A request was rejected."""


class InvalidProducerEpoch(BrokerError):
    """The producer has been fenced by a newer epoch."""


class InvalidProducerIdMapping(BrokerError):
    """The producer id does not belong to the transactional.id."""


class ProducerFenced(BrokerError):
    """The coordinator knows a newer epoch of the producer."""


class InvalidTransactionState(BrokerError):
    """The request does not fit the state of the transaction."""


class ConcurrentTransactions(BrokerError):
    """The producer's last transaction is still ending: repeat the request."""


class NotCoordinator(BrokerError):
    """Another broker has become the coordinator: find it, and repeat the request."""


class OutOfOrderSequence(BrokerError):
    """A batch before this one is missing, or it was repeated so late that the broker has forgotten it."""


class OffsetOutOfRange(BrokerError):
    """The log does not have the offset."""


class ConnectionLost(Exception):
    """The connection broke while a request was in flight; whether it was executed is unknown."""
