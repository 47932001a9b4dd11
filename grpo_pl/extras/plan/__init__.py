"""The memory of a run, before it is started."""
