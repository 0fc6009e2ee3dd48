"""Run directories in object stores: a process beside rank 0 keeps the run at a URL as it is on the disk."""
