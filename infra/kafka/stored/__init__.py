"""The log of a stopped broker on this machine, read from its files."""
