"""What both frameworks share about the blocks of a model that are computed again."""

from hvdtrain.errors import TaskError

MARK = "recompute"  # the attribute of a block, or of its class


def no_blocks(method: str, base: str, otherwise: str) -> TaskError:
    """Return the error about a model without blocks.

    Args:
        method: the task's method that made the model.
        base: what a block is.
        otherwise: what else makes a block known.
    """
    return TaskError(
        f"checkpoint_activations: {method} gave a model without repeated blocks",
        f"Give the class of the block, a {base}, the attribute {MARK} = True, {otherwise}; "
        "or leave --checkpoint-activations out.",
    )
