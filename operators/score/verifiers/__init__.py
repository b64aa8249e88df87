"""The built-in verifiers, one in each file: pure functions from a response to a number."""
