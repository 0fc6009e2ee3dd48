"""Which parameters are trained, and how that changes in a run: what callbacks freeze and thaw."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hvdtrain.config import Config
from hvdtrain.config.values import compression_of
from hvdtrain.errors import TaskError
from hvdtrain.storage.text import counted, some

# names of what is trained from now on, is not trained any more, and was replaced: parameters or layers
Change = tuple[Sequence[str], Sequence[str], Sequence[str]]

_SHOWN = 4  # names in a message


class TrainedSetBase(ABC):
    """The parameters that are trained, and what holds them, as they were last looked at."""

    prefix = ""  # before the names of parameters, where a change is shown

    def __init__(self, model: Any, tensors: Any, named: Mapping[str, Any]) -> None:
        self._model, self._tensors, self._named = model, tensors, named
        self.look()
        self._as_built = self._seen

    def change(self) -> Change:
        """Return the names of what has changed since ``accept`` was called last. Local: no collective."""
        (trained, modes), (before, modes_before) = self._look(), self._seen
        thawed, frozen = (
            [self.prefix + n for n in sorted(names)] for names in (trained - before, before - trained)
        )
        # a layer without trainable variables, as batch norm may be, has a mode of its own
        begun, ended = sorted(modes - modes_before), sorted(modes_before - modes)
        return thawed or begun, frozen or ended, self._replaced()

    def look(self) -> None:
        """Take the flags as they are: a step of the task's own may set them."""
        self._seen = self._look()

    def accept(self, others: Collection[int] = ()) -> None:
        """Take what is trainable now as trained, and others, by identity: those that an optimizer knows."""
        self.look()
        self._tensors.train(self.ids_of(self._seen[0]) | set(others))

    def state(self, **chosen: Collection[int]) -> dict[str, list[str]] | None:
        """Return what a checkpoint keeps; None while all is as the model was built."""
        if self._seen == self._as_built:
            return None
        known = {key: [n for n, one in self._named.items() if id(one) in ids] for key, ids in chosen.items()}
        return {"trained": sorted(self._seen[0]), **known}

    def follow(self, state: dict[str, list[str]]) -> None:
        """Take what a checkpoint keeps."""
        self._set(state)
        self.accept(self.ids_of(state["optimized"]))

    def ids_of(self, names: Collection[str]) -> set[int]:
        """Return the identities of the parameters of these names; a state with others does not fit."""
        return {id(self._named[name]) for name in names if name in self._named}

    @abstractmethod
    def _look(self) -> tuple[set[str], set[str]]:
        """Return the names of what is trained, and of the layers that are in a mode of training."""

    @abstractmethod
    def _set(self, state: Mapping[str, Collection[str]]) -> None:
        """Set the flags as a checkpoint keeps them."""

    @abstractmethod
    def _replaced(self) -> list[str]:
        """Return the names of modules or parameters that were replaced."""


def follow_trained(backend: Any, config: Config, step: int) -> str:
    """Collective. Let the next step follow what callbacks have frozen or thawed; return a note of it."""
    workers, change = backend.workers, backend.trained_change()
    gathered = workers.allgather_object((workers.host, change))
    if not any(any(of_rank) for _, of_rank in gathered):
        return ""
    _check_change(gathered, config, backend)
    trained = counted(backend.follow_trained(), "parameter")
    pairs = zip(change, ("trained", "frozen"), strict=False)
    parts = [f"{some(names, _SHOWN)} {is_now}" for names, is_now in pairs if names]
    return f"from step {step} on: {'; '.join(parts)}; {trained} trained in all"


def _check_change(gathered: Sequence[tuple[str, Change]], config: Config, backend: Any) -> None:
    """Check that all workers have made the same change, and that the job can follow it."""
    changed = [rank for rank, (_, change) in enumerate(gathered) if any(change)]
    host, change = gathered[changed[0]]
    if replaced := next((change[2] for _, change in gathered if change[2]), None):
        raise refused(
            f"{some(replaced, _SHOWN)} was replaced in the model during training: what is new is neither "
            "trained nor saved",
            "Make all layers in torch_model() or tf_model(), and change their values, not the layers.",
        )
    others = [rank for rank, (_, of_rank) in enumerate(gathered) if of_rank != change]
    if others:
        alone, (other, of_other) = len(changed) == 1, gathered[others[0]]
        they = "the other workers did not" if alone else f"rank {others[0]} ({other}) {_described(of_other)}"
        raise refused(
            f"rank {changed[0]} ({host}) {'alone ' if alone else ''}{_described(change)}; {they}",
            "Give the callback every_rank = True, and change the same parameters on all workers at the same "
            "step.",
        )
    features = {
        "--shard": config.shard != "none",
        "--stages": config.stages > 1,
        "--sync-every": config.sync_every is not None,
        f"--compression {config.compression.partition(':')[0]}": compression_of(config.compression).keeps,
        "an elastic job": backend.workers.is_elastic,
        "a training step of the task's own": backend.step.is_own,
    }
    if unable := next((name for name, is_used in features.items() if is_used), ""):
        raise refused(
            f"a callback {_described(change)}: {unable} does not follow what is frozen or thawed in a run",
            f"Leave {unable} out, or freeze for the whole run: by parameter_groups, or in the task's model.",
        )


def _described(change: Change) -> str:
    pairs = zip(("thaws", "freezes"), change, strict=False)
    parts = [f"{verb} {some(names, _SHOWN)}" for verb, names in pairs if names]
    return " and ".join(parts) or "changes nothing"


def refused(problem: str, remedy: str) -> TaskError:
    """Return the error of a change that no job follows, which all workers have."""
    return TaskError(problem, remedy, everywhere=True)
