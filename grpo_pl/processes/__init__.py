"""Child processes: how they are started, limited, asked and ended. Importing this package imports nothing else."""
