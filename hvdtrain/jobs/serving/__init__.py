"""What begins with a checkpoint: evaluate, predict, export, import and load."""
