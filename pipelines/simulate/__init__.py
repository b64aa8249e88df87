"""A whole run in one process, on a simulated cluster: many histories of failures in little time."""
