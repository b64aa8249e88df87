"""A run's log, read in chunks: a trajectory's history, a version's lineage, a trace."""
