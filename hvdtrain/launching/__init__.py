"""Workers that a notebook or a script starts, for one function."""
