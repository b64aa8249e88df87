"""Between Kafka and a step: what reads topics, folds them and writes what comes of it, exactly once."""
