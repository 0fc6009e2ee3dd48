"""Files, paths and URLs: reading what others made, object stores, transfers."""
