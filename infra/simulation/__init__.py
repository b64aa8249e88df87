"""A Kafka cluster in memory, to try many histories of failures in little time."""
