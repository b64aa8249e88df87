"""What is read back of a run: its log, the audit, the state that its metrics give, its folder."""
