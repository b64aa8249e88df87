"""Worker processes that run user code, with resource limits and a JSON protocol."""
