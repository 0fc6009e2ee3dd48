"""One framework's side of the comparison, in the processes that run that framework."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hvdtrain.backends.base import Backend, PortableState
from hvdtrain.config import Config
from hvdtrain.errors import ENDINGS, NOT_THE_TASKS, HvdtrainError, PeerLostError, TaskError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.jobs.opening.setup import TaskData, build
from hvdtrain.jobs.resume import ResumePoint, restore
from hvdtrain.jobs.training_run import new_session
from hvdtrain.session import Session, readers_for
from hvdtrain.tools.parity.observation import Observation
from hvdtrain.tools.parity.probe import in_fp64, make_probe, model_part, observe, try_out
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.seeding import seed_host_generators
from hvdtrain.workers.user_errors import where_raised

T = TypeVar("T")

# fields that change how a step is done and not what it computes, or that a comparison leaves out
_LEFT_OUT: dict[str, Any] = {
    "compile": False, "checkpoint_activations": False, "profile": None, "resume": None, "sync_every": None,
    "shard": "none", "stages": 1, "stage_cuts": None,
}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One framework with the task's model.

    Attributes:
        config: the config, without what a comparison leaves out.
        backend: the framework.
        task_data: the task with its data.
        keeps_initial_values: whether training would start from what the model's own initializers give.
    """

    config: Config
    backend: Backend
    task_data: TaskData
    keeps_initial_values: bool = False

    def initial(self) -> PortableState:
        """Collective. Return the parameters that the model starts from; on ranks other than 0, nothing."""
        restore(self.config, self.backend, len(self.task_data.train_data))
        return self._parameters()

    def own_initial(self) -> PortableState:
        """Collective. Return the parameters that the model's own initializers give; nothing if not needed."""
        if not self.keeps_initial_values:
            return {}
        task = self.task_data.task
        build(self.config.model_copy(update={"initial_parameters": "model"}), task, self.backend)
        found = self._parameters()
        build(self.config, task, self.backend)
        return found

    def _parameters(self) -> PortableState:
        pending = self.backend.gather_state()
        return model_part({} if pending is None else pending.read())

    def observe(self, start: PortableState) -> Observation:
        """Collective. Load parameters, and return what the model does.

        Args:
            start: parameters that both frameworks have, on rank 0; not looked at on other ranks.

        Raises:
            TaskError: If the task's code fails.
        """
        return self._observe_or_fail(self.config, start)

    def observe_in_fp64(self, start: PortableState) -> Observation | str:
        """Collective. Return what the model does in fp64, or why it cannot, in words.

        Args:
            start: as ``observe`` takes it.

        Raises:
            TaskError: If the task's code fails in a step that several workers do together.
        """
        config = self.config.model_copy(update={"precision": "fp32"})
        workers = self.backend.workers
        with in_fp64(config.framework):
            ACTIVITY.enter("building the model in fp64", is_long=True)
            # one of several workers may fail alone, and the steps have collectives
            tried = _attempted(lambda: self._try_out(config, with_batch=workers.size > 1))
            if problems := [problem for problem in workers.allgather_object(tried) if problem]:
                return str(problems[0])
            if workers.size > 1:
                return self._observe_or_fail(config, start, is_fp64=True)
            return _attempted(lambda: self._observe(config, start, is_fp64=True))

    def _try_out(self, config: Config, *, with_batch: bool) -> None:
        """Build the model in fp64, and let it compute. Local: no collective."""
        build(config, self.task_data.task, self.backend)
        if not with_batch:
            return
        with self._session(config) as session:
            try_out(session, make_probe(self.backend, self.task_data.task, config))

    def _observe_or_fail(self, config: Config, start: PortableState, is_fp64: bool = False) -> Observation:
        try:
            return self._observe(config, start, is_fp64)
        except (*NOT_THE_TASKS, PeerLostError):
            raise
        except Exception as error:
            title = FRAMEWORKS[self.config.framework].title
            raise TaskError(
                f"the model or the loss of task {self.config.task} failed in {title}: {where_raised(error)}",
                "Train it in this framework first: --framework " + self.config.framework,
            ) from error

    def _observe(self, config: Config, start: PortableState, is_fp64: bool = False) -> Observation:
        pending = self.backend.gather_state()
        own = None if pending is None else pending.read()
        if own is not None:
            kept = {name: value for name, value in own.items() if name not in start or is_private_to(name)}
            own = kept | {name: start[name] for name in start if name in own}
        self.backend.scatter_state(own)
        seed_host_generators(config.seed, f"step 0, rank {self.backend.workers.rank}")
        with self._session(config) as session:
            probe = make_probe(self.backend, self.task_data.task, config)
            return observe(session, probe, is_fp64=is_fp64)

    @contextmanager
    def _session(self, config: Config) -> Iterator[Session]:
        task_data = replace(self.task_data, eval_data=None)
        with readers_for(config, task_data.train_data, None) as readers:
            yield new_session(config, self.backend, task_data, ResumePoint(), readers)


def _attempted(work: Callable[[], T]) -> T | str:
    """Return what work returns, or why it failed, in words."""
    try:
        return work()
    except (*ENDINGS, PeerLostError):
        raise
    except HvdtrainError as error:
        return error.problem.splitlines()[0]
    except Exception as error:
        return where_raised(error).splitlines()[0]


def is_private_to(name: str) -> bool:
    """Return whether an array is none of the model's."""
    return not name.startswith("model/")


def parity_config(config: Config) -> tuple[Config, list[str]]:
    """Return a config without what a comparison leaves out, and a note on what that is."""
    found = [name for name, value in _LEFT_OUT.items() if getattr(config, name) != value]
    notes = [f"left out of the comparison: {', '.join(found)}"] if found else []
    return config.model_copy(update=_LEFT_OUT), notes
