"""What `--shard` saves of memory and costs in time: a GPT with AdamW, with and without it.

    python benchmarks/sharding.py
    python benchmarks/sharding.py --frameworks torch --workers 4

Each job runs as a whole, one thread per worker; the kinds of sharding alternate. Memory is what no file backs
(RssAnon) on rank 0, the largest seen after a step, when the C library has given back what it keeps of freed
memory; other jobs than those for the times, since getting that memory again takes time. What is saved is
compared with the formula, in multiples of the parameters' size P. Times mean something where every worker has
a core.
"""

import argparse
import ctypes
import itertools
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace

import psutil

import hvdtrain

KINDS = ("none", "optimizer", "gradients")
OPTIONS = {"model": "gpt", "layers": 8, "heads": 6, "context": 32, "vocabulary": 65}
SKIPPED = 5  # first steps, which compile and allocate


@dataclass(frozen=True)
class Run:
    """What a job took on rank 0.

    Attributes:
        seconds: its median step.
        bytes: its memory.
        parameter_bytes: the size of its parameters.
    """

    seconds: float
    bytes: int
    parameter_bytes: int


class Watch(hvdtrain.Callback):
    """Keeps times of steps, or the memory after each."""

    def __init__(self, is_of_memory: bool) -> None:
        self._is_of_memory = is_of_memory
        self.seconds: list[float] = []
        self.bytes = 0
        self._before = time.perf_counter()

    def on_step(self, step, metrics) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._before)
        self._before = now
        if self._is_of_memory:
            ctypes.CDLL(None).malloc_trim(0)
            self.bytes = max(self.bytes, anonymous_bytes())


def anonymous_bytes() -> int:
    """Return how much memory of this process no file backs."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def train(framework: str, shard: str, steps: int, channels: int, run_dir: str) -> Run:
    """Train as one of several workers; with few steps, to look at memory."""
    watch = Watch(is_of_memory=steps <= SKIPPED)
    hvdtrain.train(
        "synthetic",
        framework=framework,
        task_options={**OPTIONS, "channels": channels},
        optimizer="adamw",
        shard=shard,
        steps=steps,
        batch_size=4,
        device="cpu",
        threads=1,
        log_every=1000,
        quiet=True,
        callbacks=[watch],
        run_dir=run_dir,
    )
    parameters = 12 * OPTIONS["layers"] * channels**2 * 4
    if not watch.seconds:  # callbacks are rank 0's
        return Run(0.0, 0, parameters)
    return Run(statistics.median(watch.seconds[SKIPPED:] or [0.0]), watch.bytes, parameters)


def saved(shard: str, workers: int, framework: str) -> float:
    """Return what a kind of sharding saves by its formula, in multiples of the parameters."""
    copies = {"none": 0, "optimizer": 2, "gradients": 3}[shard]
    own_part = 1 / workers if framework == "tf" and shard != "none" else 0
    return copies * (1 - 1 / workers) - own_part


def measured(framework: str, controller: str, workers: int, args: argparse.Namespace) -> dict[str, list[Run]]:
    """Return what each kind of sharding gave, one for each repetition."""
    found: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    for kind in KINDS * args.repeat:
        with tempfile.TemporaryDirectory() as folder:
            job = {"np": workers, "controller": controller}
            timed = (framework, kind, args.steps, args.channels, f"{folder}/run")
            seconds = hvdtrain.launch(train, args=timed, **job).seconds
            looked_at = (framework, kind, SKIPPED, args.channels, f"{folder}/memory")
            found[kind].append(replace(hvdtrain.launch(train, args=looked_at, **job), seconds=seconds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frameworks", nargs="+", default=["torch", "tf"], choices=["torch", "tf"])
    parser.add_argument("--controllers", nargs="+", default=["mpi"], choices=["mpi", "gloo"])
    parser.add_argument("--workers", nargs="+", type=int, default=[2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--channels", type=int, default=384, help="of the GPT, a multiple of 6")
    args = parser.parse_args()
    print("| framework | controller | workers | --shard | step, ms | relative | MB | saved, P | formula |")
    print("|---" * 9 + "|")
    for framework, controller, workers in itertools.product(args.frameworks, args.controllers, args.workers):
        found = measured(framework, controller, workers, args)
        for kind, runs in found.items():
            pairs = list(zip(runs, found["none"], strict=True))
            ratios = [own.seconds / other.seconds for own, other in pairs]
            less = [(other.bytes - own.bytes) / own.parameter_bytes for own, other in pairs]
            cells = [framework, controller, workers, kind]
            cells.append(f"{statistics.median(run.seconds for run in runs) * 1e3:.0f}")
            cells.append(f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f}-{max(ratios):.2f})")
            cells.append(f"{statistics.median(run.bytes for run in runs) / 1e6:.0f}")
            cells += [f"{statistics.median(less):.2f}", f"{saved(kind, workers, framework):.2f}"]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
