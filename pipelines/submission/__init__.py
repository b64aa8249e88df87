"""What a pipeline that is to be submitted is: its graph, topics and options, and what it lacks."""
