"""How results are shown: terminal views, reports, tables, metrics for monitoring systems."""
