"""Recording some steps of a job: one trace of all workers on one clock, and the largest costs as text."""
