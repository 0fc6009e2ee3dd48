"""Commands that launch workers themselves are not to be launched."""

from hvdtrain.host import launches
from hvdtrain.jobs.setup import check_may_be_elastic


def check_is_not_launched(command: str) -> None:
    """Check that no launcher, also of an elastic job, started this process.

    Raises:
        UsageError: If one did.
    """
    check_may_be_elastic(None)
    launches.check_is_not_launched(command, "-np N ...")
