"""The weight store of a machine: complete, verified versions in shared memory, and publishing of new ones."""
