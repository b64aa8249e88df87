"""The state of a run as its control records and metrics give it, folded one by one."""
