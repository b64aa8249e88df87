"""One verifier a file: pure functions from what a response says to a number."""
