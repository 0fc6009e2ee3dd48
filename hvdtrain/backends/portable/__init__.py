"""The state that does not know its framework: names, initial values, moving average, files."""
