"""A worker of a job that tries one micro-batch: a real training of some steps, in a process of its own."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from hvdtrain.backends.step_metrics import StepMetrics
from hvdtrain.bench.blocks import Recorder, run_block
from hvdtrain.bench.measure import bench_config, steps_of_block
from hvdtrain.bench.worker import layers_from_json, run_worker
from hvdtrain.config import Config
from hvdtrain.frameworks import FRAMEWORKS
from hvdtrain.host.memory import is_out_of_memory
from hvdtrain.metrics import StepInfo
from hvdtrain.search.job import OpenJob, opened_job, session_of
from hvdtrain.search.memory import MemoryWatch, mark

_FIRST_STEPS = 5
_LOSSES = 8  # of the first steps, which tell whether the curve is the same
MARKER = ".out-of-memory"


class _LossRecorder(Recorder):
    """A recorder that keeps the losses of the first steps.

    Attributes:
        losses: the losses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_step(self, step: StepInfo, metrics: StepMetrics) -> None:
        """Keep what a step's metrics say."""
        super().on_step(step, metrics)
        if len(self.losses) < _LOSSES:
            self.losses.append(metrics.mean("loss"))


def work(specification: dict[str, Any]) -> None:
    """Collective. Train with a micro-batch, and write on rank 0 how fast it was and what it took."""
    found = Path(specification["found"])
    marker = found.with_suffix(MARKER)
    watch = MemoryWatch(specification["limit"], marker)
    try:
        with opened_job(layers_from_json(specification["layers"])) as job:
            measured = _measured(job, watch, specification["seconds"])
    except BaseException as error:
        if is_out_of_memory(error):
            text = str(error) or type(error).__name__
            mark(marker, f"memory did not suffice: {text.splitlines()[0]}")
        raise
    if measured is not None:
        found.write_text(json.dumps(measured), encoding="utf-8")


def _measured(job: OpenJob, watch: MemoryWatch, seconds: float) -> dict[str, Any] | None:
    """Collective. Train, and return what was found on rank 0, None on other ranks."""
    workers, recorder = job.backend.workers, _LossRecorder()
    with session_of(job, bench_config(job.config)) as (session, _):
        session.report = recorder
        first = sum(run_block(session, recorder, _FIRST_STEPS)[0]) / _FIRST_STEPS
        slowest = max(workers.allgather_object(first))
        steps = steps_of_block(seconds, slowest)
        times = run_block(session, recorder, steps)[0]
        global_batch = session.plan().batch.global_batch
    device_bytes = _device_bytes(job.config)
    gathered = workers.allgather_object((workers.host, sum(times), watch.peak, device_bytes))
    if workers.rank:
        return None
    of_hosts: dict[str, int] = {}
    for host, _, taken, _ in gathered:
        of_hosts[host] = of_hosts.get(host, 0) + taken
    on_devices = [taken for *_, taken in gathered if taken is not None]
    return {
        "device": job.backend.info.description,
        "global_batch": global_batch,
        "samples_per_second": global_batch * steps / max(taken for _, taken, *_ in gathered),
        "host_bytes": max(of_hosts.values()),
        "device_bytes": max(on_devices, default=None),
        "losses": recorder.losses,
        "steps": steps,
    }


def _device_bytes(config: Config) -> int | None:
    """Return the most memory that this worker took on its GPU; None if it computes on the CPU."""
    if config.device == "cpu":
        return None
    folder = FRAMEWORKS[config.framework].module.split(".")[-2]
    found: int | None = import_module(f"hvdtrain.search.{folder}.device_memory").device_peak_bytes()
    return found


if __name__ == "__main__":
    run_worker(work)
