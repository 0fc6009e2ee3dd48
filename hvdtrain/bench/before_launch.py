"""What is wrong with jobs that a command launches, as far as their options and this host's Horovod tell."""

from collections.abc import Iterable

from hvdtrain.config import Config
from hvdtrain.errors import UsageError
from hvdtrain.horovod_build.installed import BUILD_COMMAND, installed_build
from hvdtrain.jobs.compatibility import check
from hvdtrain.jobs.features import Job
from hvdtrain.training_plan import batch_plan

_TITLES = {"mpi": "MPI", "gloo": "Gloo"}


def check_before_launch(config: Config, counts: Iterable[int], controller: str | None) -> None:
    """Check what each of the jobs would be refused for, before any of them is started.

    Args:
        config: the jobs' config.
        counts: their numbers of workers.
        controller: the user's choice; None for horovodrun's.

    Raises:
        UsageError: If Horovod was built without the controller.
        ConfigError: If a worker would have no samples.
    """
    check(Job(config, command="bench"))
    build = installed_build()
    if build is not None and controller is not None:
        has = {"mpi": build.mpi is not None, "gloo": build.gloo}[controller]
        if not has:
            title = _TITLES[controller]
            raise UsageError(
                f"--controller {controller}: Horovod was built without {title}",
                f"Leave --controller out, or build Horovod with {title} ({BUILD_COMMAND}).",
            )
    for count in counts:
        batch_plan(config, count, None)
