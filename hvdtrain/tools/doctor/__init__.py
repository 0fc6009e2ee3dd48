"""The doctor: find out why a cluster does not work, and what to do about it."""
