"""Every error that hvdtrain raises on purpose, and the exit code that each one ends a job with.

::

    HvdtrainError
    ├── UsageError                    2   a bad option, config or task
    │   ├── ConfigError                   a config field: unknown, wrong type, out of range
    │   ├── TaskError                     a task that cannot be loaded or does not fit
    │   ├── DataError                     a data set that cannot be used
    │   │   └── BadSampleError                one sample that cannot be read
    │   └── CheckpointError               a checkpoint that is missing, damaged or does not fit
    ├── EnvironmentFault              3   the machine, the cluster or the installation
    │   ├── HorovodBuildError             Horovod is missing, partial or built for something else
    │   ├── AgreementError                workers that do not agree before training
    │   ├── PeerLostError                 another worker went away
    │   └── SaveError                     a checkpoint cannot be written, and that should end the job
    └── TrainingError                 4   training itself failed
        ├── NonFiniteLossError            the loss became NaN or infinite
        ├── ReplicaDriftError             the workers' parameters are no longer equal
        └── WorkerFailure                 the task's own code raised while training

    Stopped                      75   stopped on request after saving; --resume goes on
    Interrupted                   128+n   stopped by signal n at once (Ctrl-C is 130)

An error says what was found, what the rule is and what to do: ``problem`` is the first two,
``remedy`` the last. The command line prints both on one screen, without a traceback.
"""

import signal

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_ENVIRONMENT = 3
EXIT_TRAINING = 4
EXIT_STOPPED = 75


class HvdtrainError(Exception):
    """An error with a message for the person who runs the job.

    Args:
        problem: what was found and which rule it breaks, naming the field or the file.
        remedy: what to do about it; empty where ``problem`` already says so.
        everywhere: whether every worker raises it alike, so that one of them can speak for all.
    """

    exit_code = 1

    def __init__(self, problem: str, remedy: str = "", *, everywhere: bool = False) -> None:
        super().__init__(problem if not remedy else f"{problem}\n{remedy}")
        self.problem = problem
        self.remedy = remedy
        self.everywhere = everywhere


class UsageError(HvdtrainError):
    """A bad option, config or task."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """A config field that is unknown, of the wrong type, out of range or contradicts another."""


class TaskError(UsageError):
    """A task that cannot be loaded, or whose model, loss or metrics do not fit."""


class DataError(UsageError):
    """A data set that cannot be used: empty, of an unknown form, inconsistent."""


class BadSampleError(DataError):
    """A sample that cannot be read, while others can; ``on_bad_sample`` says what follows."""


class CheckpointError(UsageError):
    """A checkpoint that is missing, damaged or belongs to another training."""


class EnvironmentFault(HvdtrainError):
    """The machine, the cluster or the installation is not fit for the job."""

    exit_code = EXIT_ENVIRONMENT


class HorovodBuildError(EnvironmentFault):
    """Horovod is missing, lacks an extension or was built for other framework versions."""


class AgreementError(EnvironmentFault):
    """The workers of a job differ in something that must be equal on all of them."""


class PeerLostError(EnvironmentFault):
    """A collective failed because another worker ended."""


class SaveError(EnvironmentFault):
    """A checkpoint could not be written, and the config or the end of the job makes that an error."""


class TrainingError(HvdtrainError):
    """Training itself failed."""

    exit_code = EXIT_TRAINING


class NonFiniteLossError(TrainingError):
    """The loss became NaN or infinite."""


class ReplicaDriftError(TrainingError):
    """The workers' copies of the parameters are no longer equal."""


class WorkerFailure(TrainingError):
    """The task's own code raised while the job ran; the cause is the original exception."""


class Stopped(BaseException):
    """Raised on all workers when training has stopped on request (SIGTERM) and its state is saved.

    Not a subclass of Exception: a script that does not know it ends with exit code 75, by which a
    scheduler knows that the job may be queued again.
    """

    exit_code = EXIT_STOPPED


class Interrupted(BaseException):
    """Raised in the main thread by a signal that ends the job at once.

    Not a subclass of Exception, so that ``except Exception`` in a task does not swallow it.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number
