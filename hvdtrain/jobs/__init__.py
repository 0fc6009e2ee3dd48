"""One job, from its command line to its exit code."""
