"""A run's log, read for people: records some at a time, a trajectory's life, a version's lineage."""
