"""A Kafka cluster, a network, processes and clocks in memory, to try many histories of failures in little time."""
