"""Run directories in object stores: a process keeps the run's files there as they are here."""
