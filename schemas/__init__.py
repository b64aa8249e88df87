"""Frozen records, their encodings and the topics that carry them. Standard library and pyarrow only."""
