"""The run directory of a job: its lock, its files, where it came from and how it ended."""
