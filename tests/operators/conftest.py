"""Makes `in_memory_log`, `buffer_harness` and `record_factories` importable from the tests of every operator."""
