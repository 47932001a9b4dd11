"""Files: written whole or not at all, rows read and written one by one, and what lies where in a run folder."""
