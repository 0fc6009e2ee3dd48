"""Start Horovod itself if all other checks passed, and measure the speed of its all-reduce."""

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

from hvdtrain.doctor.transport import Transport, wait_until
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.tools.doctor.launcher_transports import MpiTransport
from hvdtrain.tools.doctor.speed import SIZES

_START_SECONDS = 60.0
_ALLREDUCE_SECONDS = 60.0
_SIZE_SECONDS = 0.4
_REPEATS = 20
_PREFIX = "hvdtrain-horovod:"
_TIMED_OUT = "it did not finish within {:.0f} s"


def start_horovod(
    transport: Transport, framework: str, speed: bool, should_stop: Callable[[], bool]
) -> dict[str, Any]:
    """Collective. Start Horovod on all workers, and measure its all-reduce.

    Args:
        transport: between the workers.
        framework: "torch" or "tf".
        speed: whether to measure several message sizes instead of one.
        should_stop: returns whether there is no time left to wait.

    Returns:
        ``seconds`` of an all-reduce by size in bytes, ``workers`` and ``controller``. If Horovod did not
        start: ``errors``, the error of each rank, an empty text if it had none.
    """
    limit = _START_SECONDS + (_ALLREDUCE_SECONDS if speed else 0)
    # Gloo aborts its process if it cannot connect, so it runs in a child. MPI has started in this process.
    run = _run_in_process if isinstance(transport, MpiTransport) else _run_in_child
    result = run(framework, speed, limit, should_stop)
    results = transport.allgather("horovod", result, limit)
    errors = [(one or {"error": "it ended"}).get("error", "") for one in results]
    if any(errors):
        return {"errors": errors}
    slowest = {size: max(one["seconds"][size] for one in results) for size in results[0]["seconds"]}
    return {**results[0], "seconds": slowest}


def _run_in_process(
    framework: str, speed: bool, limit_seconds: float, should_stop: Callable[[], bool]
) -> dict[str, Any]:
    result: dict[str, Any] = {}

    def run() -> None:
        try:
            result.update(_measure(framework, speed))
        except Exception as error:  # whatever Horovod and the framework raise
            result["error"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_until(lambda: not thread.is_alive() or should_stop(), limit_seconds)
    return {"error": _TIMED_OUT.format(limit_seconds)} if thread.is_alive() else result


def _run_in_child(
    framework: str, speed: bool, limit_seconds: float, should_stop: Callable[[], bool]
) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, framework, "speed" if speed else "start"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors)
        try:
            if not wait_until(lambda: child.poll() is not None or should_stop(), limit_seconds):
                return {"error": _TIMED_OUT.format(limit_seconds)}
        finally:
            child.kill()
            child.wait()
        out.seek(0)
        errors.seek(0)
        for line in out.read().decode(errors="replace").splitlines():
            if line.startswith(_PREFIX):
                result: dict[str, Any] = json.loads(line.removeprefix(_PREFIX))
                return result
        return {"error": _exit_reason(child.returncode, errors.read().decode(errors="replace"))}


def _exit_reason(code: int, stderr: str) -> str:
    """Return why the child failed. Gloo prints its exception before it aborts the process."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    what = next((line for line in lines if line.startswith("what():")), lines[-1] if lines else "")
    ended = f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    text = re.sub(r"\[[^]]*\] ", "", what.removeprefix("what():").strip())
    return f"{ended}: {text[:200]}" if text else ended


def _measure(framework: str, speed: bool) -> dict[str, Any]:
    hvd = import_module(FRAMEWORKS[framework].horovod)
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
            if (
                len(taken) == 1
            ):  # the first one includes negotiation; all workers must agree on the number of repeats
                repeats = _agreed_repeats(hvd, framework, taken[0])
        seconds[str(size)] = median(taken[1:])
    controller = "MPI" if hvd.mpi_enabled() else "Gloo"
    return {"seconds": seconds, "workers": hvd.size(), "controller": controller}


def _agreed_repeats(hvd: Any, framework: str, first_seconds: float) -> int:
    import numpy as np

    own_repeats = max(2, min(_REPEATS, int(_SIZE_SECONDS / max(first_seconds, 1e-6))))
    least = hvd.allreduce(_tensor(framework, 4, own_repeats), op=hvd.Min, name="hvdtrain.doctor.repeats")
    return int(np.asarray(least)[0])


def _tensor(framework: str, size: int, value: float = 0.0) -> Any:
    import numpy as np

    array = np.full(size // 4, value, "float32")
    if framework == "torch":
        return import_module("torch").from_numpy(array)
    return import_module("tensorflow").constant(array)


if __name__ == "__main__":
    print(_PREFIX + json.dumps(_measure(sys.argv[1], sys.argv[2] == "speed")), flush=True)
