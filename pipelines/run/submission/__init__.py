"""One pipeline submitted alone: its graph, topics and options, and the process that keeps it running."""
