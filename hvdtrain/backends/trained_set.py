"""Which parameters are trained, and how that changes in a run: what callbacks freeze and thaw."""

from collections.abc import Sequence
from typing import Any

from hvdtrain.config import Config
from hvdtrain.config.values import compression_of
from hvdtrain.errors import TaskError
from hvdtrain.storage.text import counted, some

# names of what is trained from now on, is not trained any more, and was replaced: parameters or layers
Change = tuple[Sequence[str], Sequence[str], Sequence[str]]

_SHOWN = 4  # names in a message


def follow_trained(backend: Any, config: Config, step: int) -> str:
    """Collective. Let the next step follow what callbacks have frozen or thawed; return a note of it."""
    workers, change = backend.workers, backend.trained_change()
    gathered = workers.allgather_object((workers.host, change))
    if not any(any(of_rank) for _, of_rank in gathered):
        return ""
    if (error := _refused_change(gathered, config, workers.is_elastic)) is not None:
        raise error
    return _describe_change(change, step, backend.follow_trained())


def _refused_change(
    gathered: Sequence[tuple[str, Change]], config: Config, is_elastic: bool
) -> TaskError | None:
    """Return why a change is refused; None if all workers have made the same, and the job can follow it."""
    changed = [rank for rank, (_, change) in enumerate(gathered) if any(change)]
    host, change = gathered[changed[0]]
    if replaced := next((change[2] for _, change in gathered if change[2]), None):
        return _refused(
            f"{some(replaced, _SHOWN)} was replaced in the model during training: what is new is neither "
            "trained nor saved",
            "Make all layers in torch_model() or tf_model(), and change their values, not the layers.",
        )
    others = [rank for rank, (_, of_rank) in enumerate(gathered) if _hashable(of_rank) != _hashable(change)]
    if others:
        alone, (other, of_other) = len(changed) == 1, gathered[others[0]]
        they = "the other workers did not" if alone else f"rank {others[0]} ({other}) {_words(of_other)}"
        return _refused(
            f"rank {changed[0]} ({host}) {'alone ' if alone else ''}{_words(change)}; {they}",
            "Give the callback every_rank = True, and change the same parameters on all workers at the same "
            "step.",
        )
    features = {
        "--shard": config.shard != "none",
        "--stages": config.stages > 1,
        "--sync-every": config.sync_every is not None,
        f"--compression {config.compression.partition(':')[0]}": bool(
            compression_of(config.compression).keeps
        ),
        "an elastic job": is_elastic,
    }
    unable = [name for name, is_used in features.items() if is_used]
    if not unable:
        return None
    return _refused(
        f"a callback {_words(change)}: {unable[0]} does not follow what is frozen or thawed during training",
        f"Leave {unable[0]} out, or freeze for the whole run: by parameter_groups, or in the task's model.",
    )


def _describe_change(change: Change, step: int, trained: int) -> str:
    """Return what changes, for a note."""
    thawed, frozen, _ = change
    parts = [f"{some(thawed, _SHOWN)} trained"] if thawed else []
    parts += [f"{some(frozen, _SHOWN)} frozen"] if frozen else []
    return f"from step {step} on: {'; '.join(parts)}; {counted(trained, 'parameter')} trained in all"


def frozen_by_config(names: Sequence[str]) -> TaskError:
    """Return the error for parameters that ``parameter_groups`` freezes and a callback thaws."""
    return _refused(
        f"a callback thaws {some(names, _SHOWN)}, which parameter_groups freezes for the whole run",
        "Freeze it in torch_model() or tf_model() instead.",
    )


def not_in_own_step() -> TaskError:
    """Return the error for a callback that freezes or thaws what a step of the task's own trains."""
    return _refused(
        "a callback freezes or thaws parameters, which a training step of the task's own does not follow",
        "Decide within torch_step() or tf_step() which losses and optimizers are used.",
    )


def _words(change: Change) -> str:
    thawed, frozen, _ = change
    parts = [f"thaws {some(thawed, _SHOWN)}"] if thawed else []
    parts += [f"freezes {some(frozen, _SHOWN)}"] if frozen else []
    return " and ".join(parts) or "changes nothing"


def _hashable(change: Any) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(names) for names in change)


def _refused(problem: str, remedy: str) -> TaskError:
    return TaskError(problem, remedy, everywhere=True)
