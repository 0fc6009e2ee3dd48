"""Built-in tasks, one module each. A module's ``task`` makes the task from its options."""
