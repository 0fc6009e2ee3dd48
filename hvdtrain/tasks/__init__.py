"""Built-in tasks, one module each. A module's ``task`` makes the task from its options.

The name of a task is its module's, with dashes for underscores; ``_options`` is no task.
"""
