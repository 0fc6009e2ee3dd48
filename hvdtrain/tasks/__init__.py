"""Built-in tasks, one module each. A module's ``task`` is the class of the task.

The name of a task is that of its module with dashes in place of underscores.
"""
