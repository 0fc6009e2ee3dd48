"""A worker's membership in an elastic job: its connection to the driver."""
