"""Makes `log_model` and `records_here` importable from the tests of every operator."""
