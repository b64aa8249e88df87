"""The source, the fold and the transactional sink of every pipeline: read topics, fold records, write once."""
