"""The errors that hvdtrain raises, by the exit code of a job that ends with them.

- 2, an invalid option, config or task: ``UsageError`` and the classes derived from it;
- 3, machine, cluster or installation: ``EnvironmentFault`` and the classes derived from it, ``JobEnded``;
- 4, training failed: ``TrainingError`` and the classes derived from it;
- 75: ``Stopped``; 128 + n: ``Interrupted`` by signal n (Ctrl-C is 130); 0: ``Removed``.

An error has two parts: ``problem`` states what was found and which rule it violates, and ``remedy``
states what to do. The command line prints both without a traceback.
"""

import signal
import traceback

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_ENVIRONMENT = 3
EXIT_TRAINING = 4
EXIT_STOPPED = 75


class HvdtrainError(Exception):
    """Base class of the errors that hvdtrain raises for the user.

    Args:
        problem: what was found and which rule it violates, with the name of the field or file.
        remedy: what to do; empty if ``problem`` already says it.
        everywhere: whether every worker raises the same error, so that only rank 0 reports it.
    """

    exit_code = 1

    def __init__(self, problem: str, remedy: str = "", *, everywhere: bool = False) -> None:
        super().__init__(problem if not remedy else f"{problem}\n{remedy}")
        self.problem = problem
        self.remedy = remedy
        self.everywhere = everywhere

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows: the message, after the traceback of the task's code."""
        cause = self.__cause__ if isinstance(self, WorkerFailure) else None
        lines = [] if cause is None else "".join(traceback.format_exception(cause)).splitlines()
        remedy = [f"  {line}" for line in self.remedy.splitlines()]
        return [*lines, f"{type(self).__name__}: {self.problem}", *remedy]


class UsageError(HvdtrainError):
    """An option, config or task is invalid."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """A config field is unknown, has the wrong type, is out of range or conflicts with another."""


class TaskError(UsageError):
    """A task cannot be loaded, or its model, loss or metrics are invalid."""


class DataError(UsageError):
    """A data set cannot be used: it is empty, inconsistent or of an unsupported type."""


class BadSampleError(DataError):
    """A single sample cannot be read; ``on_bad_sample`` determines what happens."""


class CheckpointError(UsageError):
    """A checkpoint is missing, corrupt or belongs to a different training job."""


class EnvironmentFault(HvdtrainError):
    """The machine, the cluster or the installation cannot run the job."""

    exit_code = EXIT_ENVIRONMENT


class HorovodBuildError(EnvironmentFault):
    """Horovod is missing, lacks an extension or was built for other framework versions."""


class AgreementError(EnvironmentFault):
    """The workers of a job differ in a value that must be equal on all of them."""


class PeerLostError(EnvironmentFault):
    """A collective failed because another worker ended or does not answer, which ``names_worker`` says."""

    def __init__(
        self, problem: str, remedy: str = "", *, everywhere: bool = False, names_worker: bool = False
    ) -> None:
        super().__init__(problem, remedy, everywhere=everywhere)
        self.names_worker = names_worker


class RefusedError(EnvironmentFault):
    """An elastic job does not take this worker, which differs from its workers or is in no slot."""


class DiscoveryError(EnvironmentFault):
    """The hosts of an elastic job cannot be found out: its discovery script fails, or names none."""


class ExchangeError(EnvironmentFault):
    """An object cannot travel between workers, or what arrived is not what a worker sends."""


class SaveError(EnvironmentFault):
    """A checkpoint could not be written at the end of a job, or with ``on_save_error: stop``."""


class TrainingError(HvdtrainError):
    """Training failed."""

    exit_code = EXIT_TRAINING


class NonFiniteLossError(TrainingError):
    """The loss became NaN or infinite."""


class NonFiniteParameterError(TrainingError):
    """A parameter became NaN or infinite while the loss was finite; found when the state was to be saved."""


class ReplicaDriftError(TrainingError):
    """The workers' copies of the parameters are no longer equal."""


class LackOfMemoryError(TrainingError):
    """Memory of the host or of the GPU does not suffice; ``__cause__`` is the framework's exception."""


class WorkerFailure(TrainingError):
    """The task's code raised an exception during the job; ``__cause__`` is that exception."""


class JobEnded(HvdtrainError):
    """The driver of an elastic job ended it; ``speaks`` says whether this worker reports it."""

    exit_code = EXIT_ENVIRONMENT

    def __init__(
        self,
        problem: str,
        remedy: str = "",
        *,
        everywhere: bool = False,
        exit_code: int = EXIT_ENVIRONMENT,
        speaks: bool = False,
    ) -> None:
        super().__init__(problem, remedy, everywhere=everywhere)
        self.exit_code = exit_code
        self.speaks = speaks


class Stopped(BaseException):
    """Raised on all workers when training has stopped on request (SIGTERM), saved."""

    exit_code = EXIT_STOPPED


class Interrupted(BaseException):
    """Raised in the main thread by a signal that ends the job at once; no subclass of Exception."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number


class WorldChanged(BaseException):
    """Raised on all workers of an elastic job at one step boundary, where they enter their next world."""


class Removed(BaseException):
    """Raised in a worker of an elastic job that leaves in order, while the others continue."""

    exit_code = EXIT_DONE


# What ends a job and is nobody's error. Every other BaseException that is no Exception comes from the
# task's code, such as the SystemExit of sys.exit(), whose exit code would be that of complete training.
ENDINGS = (Stopped, Interrupted, WorldChanged, Removed, KeyboardInterrupt, GeneratorExit)
# what a handler of errors in the task's code lets through
NOT_THE_TASKS = (HvdtrainError, *ENDINGS)
