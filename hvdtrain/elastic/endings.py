"""What the driver says when an elastic job ends: what was found, and what to do."""

from collections.abc import Sequence
from typing import NamedTuple

from hvdtrain.elastic.crashes import COMMAND_NOT_FOUND, SAME_STEP, SAME_STEP_LOST, SSH_FAILED
from hvdtrain.elastic.driver.cluster import Limits
from hvdtrain.elastic.driver.roster import Worker
from hvdtrain.errors import EXIT_ENVIRONMENT, EXIT_USAGE
from hvdtrain.storage.text import counted
from hvdtrain.workers.world import Place

RESUME = "Continue from the newest checkpoint with --resume."
MEND_AND_RESUME = "Mend what they wait for, then use --resume."
_LOOK_AT_CRASH = "Look at the output of these workers. A crash of native code often leaves a core file."
_OUT_OF_MEMORY = (
    "Does the memory of a host run out at this step? The kernel's log (dmesg) says so of a process that it "
    "kills. Mend the cause, or use smaller batches, then continue with --resume."
)
CANNOT_ENTER = "Can the hosts reach one another? python -m hvdtrain doctor checks it."
FAILS_IN_WORLD = (
    "Look at the output of the workers for what fails in each world, such as an error of Horovod."
)
_CANNOT_START = "Look at the output of the workers."
_NOT_A_WORKER = (
    "The command must be python -m hvdtrain, or a script that calls hvdtrain.train(). A script that uses "
    "hvd.elastic needs HVDTRAIN_ELASTIC_DRIVER=horovod."
)
_NOT_EXECUTABLE = 126  # exit code of a shell
_NO_SLOTS = (
    "Give hosts with slots: -H, --hostfile, or a discovery script, which "
    "python -m hvdtrain doctor --host-discovery-script SCRIPT checks."
)

_LONGER_START = (
    "Give more time with --start-timeout, or look at the hosts: python -m hvdtrain doctor -H HOSTS."
)

_NAMED = 4  # workers that a message names
_LONGEST = 500  # characters of what one of them says


class Ending(NamedTuple):
    """Why a job ends, and what to do."""

    problem: str
    remedy: str


def cannot_start(last: Worker | None, command: str) -> tuple[int, Ending]:
    """Return the exit code and the end of a job whose workers failed before anything was trained.

    Args:
        last: the worker that failed last.
        command: what starts a worker.
    """
    if last is None:
        return EXIT_ENVIRONMENT, Ending("no worker can start", _CANNOT_START)
    failed = f"no worker can start: {last} {last.reason[:_LONGEST]}"
    code = last.exit_code
    if last.failure is not None:
        return last.failure.exit_code, Ending(failed, _CANNOT_START)
    if last.hello is None and code == SSH_FAILED:
        return EXIT_ENVIRONMENT, Ending(failed, f"Check it: python -m hvdtrain doctor -H {last.slot.host}")
    if last.hello is not None or last.is_late or code is None or code < 0:
        return EXIT_ENVIRONMENT, Ending(failed, _LONGER_START if last.is_late else _CANNOT_START)
    what = f"`{command}`" if command else "the command"
    ended = f"no worker can start: on {last.slot.host}, {what} ended with exit code {code}"
    if code == COMMAND_NOT_FOUND:
        problem, remedy = f"{ended}: the command was not found", "Is it installed there, and in PATH?"
    elif code == _NOT_EXECUTABLE:
        problem, remedy = f"{ended}: the command cannot be executed", "Is it a program that you may execute?"
    elif code == EXIT_USAGE:
        problem, remedy = ended, f"{_CANNOT_START} Exit code 2 means a wrong option or a missing file."
    else:
        problem, remedy = f"{ended} before it joined the job", f"{_CANNOT_START} {_NOT_A_WORKER}"
    return code or EXIT_ENVIRONMENT, Ending(problem, remedy)


def too_few_came(have: int, limits: Limits, last: Worker | None) -> Ending:
    """Return the end of a job to which too few workers came before its training began.

    Args:
        have: workers that are ready.
        limits: of the job.
        last: the worker that failed last.
    """
    least = counted(limits.least, "worker")
    problem = f"{have} of at least {least} (--min-np) came within {_timeout(limits)}"
    return Ending(problem + _last(last), _CANNOT_START if last else _NO_SLOTS)


def too_few_left(have: int, limits: Limits, last: Worker | None) -> Ending:
    """Return the end of a job that trained, and for too long had too few workers to go on."""
    were = "worker was" if have == 1 else "workers were"
    problem = f"only {have} {were} left of at least {limits.least} (--min-np) for {_timeout(limits)}"
    return Ending(problem + _last(last), _resume_with(limits.least))


def crashed_again(where: Place | None, last: Worker | None) -> Ending:
    """Return the end of a job in which a worker crashed at the same place again and again."""
    problem = f"a worker crashed {SAME_STEP} times in a row at the same place{_after(where)}{_last(last)}"
    return Ending(problem, _LOOK_AT_CRASH)


def lost_again(where: Place | None, last: Worker | None) -> Ending:
    """Return the end of a job that lost workers at the same place again and again."""
    problem = f"workers were lost {SAME_STEP_LOST} times in a row at the same place{_after(where)}"
    return Ending(problem + _last(last), _OUT_OF_MEMORY)


def all_leave(leaving: Sequence[Worker], limits: Limits) -> Ending:
    """Return the end of a job whose workers were all asked to leave."""
    are = "the only worker is" if len(leaving) == 1 else f"all {len(leaving)} workers are"
    causes = "; ".join(f"{one}: {one.wants_out[:_LONGEST]}" for one in leaving[:_NAMED])
    more = f"; and {len(leaving) - _NAMED} more" if len(leaving) > _NAMED else ""
    return Ending(f"{are} to leave, and no other is ready ({causes}{more})", _resume_with(limits.least))


def _after(where: Place | None) -> str:
    return f" after step {where.step:,}" if where else ""


def _last(last: Worker | None) -> str:
    return f"; the last to fail: {last} {last.reason[:_LONGEST]}" if last else ""


def _timeout(limits: Limits) -> str:
    return f"{limits.elastic_timeout:.0f} s (--elastic-timeout)"


def _resume_with(least: int) -> str:
    fewer = ", or with a lower --min-np" if least > 1 else ""
    return f"Continue with --resume when there are slots for {counted(least, 'worker')} or more{fewer}."
