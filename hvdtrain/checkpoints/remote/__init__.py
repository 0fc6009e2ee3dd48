"""Run directories in object stores: a process on rank 0's host keeps the run at a URL as on the disk."""
