"""Starting Horovod itself, when all else is well: whether it does, and how fast its all-reduce is."""

import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import import_module
from statistics import median
from typing import Any

from hvdtrain.doctor.exchange import Exchange, wait_until
from hvdtrain.doctor.speed import SIZES

_START_SECONDS = 60.0
_ALLREDUCE_SECONDS = 60.0
_SIZE_SECONDS = 0.4
_REPEATS = 20
_MARK = "hvdtrain-horovod:"
_TOO_LATE = "it did not get through in {:.0f} s"
_MODULES = {"torch": "horovod.torch", "tf": "horovod.tensorflow"}


def start_horovod(
    exchange: Exchange, framework: str, speed: bool, given_up: Callable[[], bool]
) -> dict[str, Any]:
    """Collective. Start Horovod on all workers, and measure its all-reduce.

    Args:
        exchange: between the workers.
        framework: "torch" or "tf".
        speed: whether to measure more than one message.
        given_up: tells whether there is no time left to wait.

    Returns:
        ``seconds`` of an all-reduce by size in bytes; ``size`` and ``controller``; or ``errors``: what
        went wrong, by worker, empty text where nothing did.
    """
    limit = _START_SECONDS + (_ALLREDUCE_SECONDS if speed else 0)
    # Gloo ends a process that it cannot connect, so it gets one of its own. MPI has started in this one.
    own = _in_process if exchange.how == "MPI" else _in_child
    outcome = own(framework, speed, limit, given_up)
    outcomes = exchange.share("horovod", outcome, limit)
    errors = [(its or {"error": "it ended"}).get("error", "") for its in outcomes]
    if any(errors):
        return {"errors": errors}
    slowest = {size: max(its["seconds"][size] for its in outcomes) for size in outcomes[0]["seconds"]}
    return {**outcomes[0], "seconds": slowest}


def _in_process(
    framework: str, speed: bool, limit_seconds: float, given_up: Callable[[], bool]
) -> dict[str, Any]:
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome.update(_work(framework, speed))
        except Exception as error:  # whatever Horovod and the framework raise
            outcome["error"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    wait_until(lambda: not thread.is_alive() or given_up(), limit_seconds)
    return {"error": _TOO_LATE.format(limit_seconds)} if thread.is_alive() else outcome


def _in_child(
    framework: str, speed: bool, limit_seconds: float, given_up: Callable[[], bool]
) -> dict[str, Any]:
    words = [sys.executable, "-m", __name__, framework, "speed" if speed else "start"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=errors)
        try:
            if not wait_until(lambda: child.poll() is not None or given_up(), limit_seconds):
                return {"error": _TOO_LATE.format(limit_seconds)}
        finally:
            child.kill()
            child.wait()
        out.seek(0)
        errors.seek(0)
        for line in out.read().decode(errors="replace").splitlines():
            if line.startswith(_MARK):
                outcome: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                return outcome
        return {"error": _why(child.returncode, errors.read().decode(errors="replace"))}


def _why(code: int, stderr: str) -> str:
    """Say why the child failed: Gloo's exception names it before the process is aborted."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    what = next((line for line in lines if line.startswith("what():")), lines[-1] if lines else "")
    ended = f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    text = re.sub(r"\[[^]]*\] ", "", what.removeprefix("what():").strip())
    return f"{ended}: {text[:200]}" if text else ended


def _work(framework: str, speed: bool) -> dict[str, Any]:
    hvd = import_module(_MODULES[framework])
    hvd.init()
    seconds: dict[str, float] = {}
    for size in SIZES if speed else SIZES[:1]:
        tensor = _tensor(framework, size)
        taken: list[float] = []
        repeats = _REPEATS
        while len(taken) < repeats:
            start = time.perf_counter()
            hvd.allreduce(tensor, op=hvd.Sum, name=f"hvdtrain.doctor.{size}")
            taken.append(time.perf_counter() - start)
            if len(taken) == 1:  # the first also negotiates; all workers must settle on one number
                repeats = _agreed_repeats(hvd, framework, taken[0])
        seconds[str(size)] = median(taken[1:])
    controller = "MPI" if hvd.mpi_enabled() else "Gloo"
    return {"seconds": seconds, "size": hvd.size(), "controller": controller}


def _agreed_repeats(hvd: Any, framework: str, first_seconds: float) -> int:
    import numpy as np

    own = max(2, min(_REPEATS, int(_SIZE_SECONDS / max(first_seconds, 1e-6))))
    total = hvd.allreduce(_tensor(framework, 4, own), op=hvd.Min, name="hvdtrain.doctor.repeats")
    return int(np.asarray(total)[0])


def _tensor(framework: str, size: int, value: float = 0.0) -> Any:
    import numpy as np

    array = np.full(size // 4, value, "float32")
    if framework == "torch":
        return import_module("torch").from_numpy(array)
    return import_module("tensorflow").constant(array)


if __name__ == "__main__":
    print(_MARK + json.dumps(_work(sys.argv[1], sys.argv[2] == "speed")), flush=True)
