"""How weights move between machines: a framed protocol over TCP, schedules of who pulls which chunk from whom."""
