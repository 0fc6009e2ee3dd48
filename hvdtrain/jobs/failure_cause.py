"""The cause of a failure, for summary.json: rank 0 writes it, and another worker may have failed."""

import contextlib
import time
from pathlib import Path

from hvdtrain.errors import HvdtrainError, PeerLostError
from hvdtrain.reporting.jsonl import write_whole
from hvdtrain.storage.files import read_regular

_NAME = ".failed-rank-"
_WAIT_SECONDS = 0.5  # for a file system that shows another host's files late
_MAX_BYTES = 10_000


def exchange_cause(
    run_dir: Path, rank: int, host: str, problem: str | None, error: BaseException | None
) -> str | None:
    """Return what a worker's summary names as the problem: another worker's, if that one failed first.

    A worker that fails leaves its problem in the run directory before it ends, if it can reach it.

    Args:
        run_dir: the run directory.
        rank: this worker.
        host: this worker's host.
        problem: this worker's own problem; None if it has none.
        error: the exception that ends this worker.
    """
    if rank == 0:
        return _find_cause(run_dir) or problem if isinstance(error, PeerLostError) else problem
    failed_itself = isinstance(error, HvdtrainError) and not (
        isinstance(error, PeerLostError) or error.everywhere
    )
    if failed_itself and problem and run_dir.is_dir():
        with contextlib.suppress(OSError, ValueError):
            write_whole(run_dir / f"{_NAME}{rank}", f"rank {rank} on {host}: {problem}"[: _MAX_BYTES // 4])
    return problem


def forget_causes(run_dir: Path) -> None:
    """Remove what workers of an earlier job left."""
    for path in run_dir.glob(f"{_NAME}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def _find_cause(run_dir: Path) -> str:
    """Return the problem that another worker left; empty if none did in time."""
    until_seconds = time.monotonic() + _WAIT_SECONDS
    while True:
        for path in sorted(run_dir.glob(f"{_NAME}*[0-9]")):
            with contextlib.suppress(OSError, ValueError):
                text = read_regular(path, _MAX_BYTES).decode()
                path.unlink()
                return text
        if time.monotonic() > until_seconds:
            return ""
        time.sleep(0.05)
