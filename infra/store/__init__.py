"""The weights that a machine holds: complete, verified versions in shared memory, and how new ones get there."""
