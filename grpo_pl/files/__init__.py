"""Files: atomic writing, rows read and written one by one, checkpoints, and run folders."""
