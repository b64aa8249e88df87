"""Makes `log_model`, `buffer_on_a_log` and `records_here` importable from the tests of every operator."""
