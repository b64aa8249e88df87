"""The state of a run: a fold over its metrics and control records."""
