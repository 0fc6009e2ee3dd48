"""The weights that ``--init`` loads: all of a checkpoint's, or the part that patterns choose."""

from hvdtrain.backends.base import Backend, PortableState, Shapes
from hvdtrain.backends.choice import Choice
from hvdtrain.backends.portable.names import OF_LAYERS, is_private
from hvdtrain.backends.portable.partial import Selection, remedy_for_misfits, select
from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.errors import CheckpointError, TaskError
from hvdtrain.workers.agreement import run_on_rank_zero


def load_initial_weights(
    found: Checkpoint, backend: Backend, weights: PortableState | None, choice: Choice
) -> str:
    """Collective. Load weights, or a part of them, into every worker; the rest keeps its initial values.

    Args:
        found: the checkpoint that they were read from.
        backend: the backend, built. If it keeps a moving average, that starts from these.
        weights: the weights on rank 0; not looked at on other ranks.
        choice: which part is loaded.

    Returns:
        A table of what was taken and what was not; empty if all was.

    Raises:
        CheckpointError: If what is chosen does not fit the model.
    """
    expected, shapes = backend.weight_shapes(), _shapes(weights or {})
    text = remedy = ""
    if choice.is_all:
        remedy = run_on_rank_zero(backend.workers, lambda: remedy_for_misfits(expected, shapes, choice))
    else:
        selection: Selection = run_on_rank_zero(
            backend.workers, lambda: select(f"checkpoint {found.path}", expected, shapes, choice)
        )
        of_layers = [name for name in weights or {} if _is_chosen_of_layer(name, choice)]
        names = {*selection.names, *of_layers}
        weights = {name: array for name, array in (weights or {}).items() if name in names}
        text = "\n".join([selection.text, *(f"  taken    {name}" for name in of_layers)])
    try:
        backend.scatter_weights(weights, is_part=not choice.is_all)
    except TaskError as error:
        raise CheckpointError(
            f"checkpoint {found.path}: {error.problem}",
            "\n".join(filter(None, [error.remedy, remedy])),
            everywhere=True,
        ) from None
    return text


def _is_chosen_of_layer(name: str, choice: Choice) -> bool:
    """Return whether patterns choose what else than variables a Keras layer keeps, such as a vocabulary."""
    path = name.removeprefix(OF_LAYERS)
    return path != name and not choice.reason_against([name, f"model/{path}"])


def _shapes(state: PortableState) -> Shapes:
    """Return the shapes of a model's arrays, without what only one framework reads."""
    return {
        name: tuple(array.shape)
        for name, array in state.items()
        if name.startswith("model/") and not is_private(name)
    }
