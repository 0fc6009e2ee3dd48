"""What `--shard` saves of memory and costs in time: a GPT with AdamW, with and without it.

    python benchmarks/sharding.py
    python benchmarks/sharding.py --frameworks torch --workers 4

Each job runs as a whole, one thread per worker; the kinds of sharding alternate. Memory is what no file backs
(RssAnon) on rank 0, the largest seen after a step, when the C library has given back what it keeps of freed
memory. What is saved is compared with the formula, in multiples of the parameters' size P. Times mean
something where every worker has a core.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import hvdtrain
from hvdtrain.host.memory import release_unused

KINDS = ("none", "optimizer", "gradients")
OPTIONS = {"model": "gpt", "layers": 8, "heads": 6, "context": 32, "vocabulary": 65}
SKIPPED = 5  # first steps, which compile and allocate


class Watch(hvdtrain.Callback):
    """Keeps times of steps and the memory after each."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.bytes = 0
        self._before = time.perf_counter()

    def on_step(self, step, metrics) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._before)
        self._before = now
        if step.step > SKIPPED:
            release_unused()
            self.bytes = max(self.bytes, anonymous_bytes())
            self._before = time.perf_counter()


def anonymous_bytes() -> int:
    """Return how much memory of this process no file backs."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def train(framework: str, shard: str, steps: int, channels: int) -> tuple[float, int, int]:
    """Train on one of several workers; return the median step in seconds, memory and parameters in bytes."""
    watch = Watch()
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
        run_dir=None,
    )
    parameters = 12 * OPTIONS["layers"] * channels**2 * 4
    if not watch.seconds:  # callbacks are rank 0's
        return 0.0, 0, parameters
    return statistics.median(watch.seconds[SKIPPED:]), watch.bytes, parameters


def saved(shard: str, workers: int, framework: str) -> float:
    """Return what a kind of sharding saves by its formula, in multiples of the parameters."""
    copies = {"none": 0, "optimizer": 2, "gradients": 3}[shard]
    own_part = 1 / workers if framework == "tf" and shard != "none" else 0
    return copies * (1 - 1 / workers) - own_part


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
    names = (
        "framework",
        "controller",
        "workers",
        "--shard",
        "step, ms",
        "relative",
        "MB",
        "saved, P",
        "formula",
    )
    print("| " + " | ".join(names) + " |")
    print("|---|---|---|---|---|---|---|---|---|")
    for framework in args.frameworks:
        for controller in args.controllers:
            for workers in args.workers:
                found: dict[str, list[tuple[float, int, int]]] = {kind: [] for kind in KINDS}
                for _ in range(args.repeat):
                    for kind in KINDS:
                        words = (framework, kind, args.steps, args.channels)
                        found[kind].append(
                            hvdtrain.launch(train, np=workers, args=words, controller=controller)
                        )
                base = found["none"]
                for kind in KINDS:
                    runs = found[kind]
                    ratios = [one[0] / other[0] for one, other in zip(runs, base, strict=True)]
                    less = [(other[1] - one[1]) / one[2] for one, other in zip(runs, base, strict=True)]
                    cells = [framework, controller, workers, kind]
                    cells.append(f"{statistics.median(one[0] for one in runs) * 1e3:.0f}")
                    cells.append(f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f}-{max(ratios):.2f})")
                    cells.append(f"{statistics.median(one[1] for one in runs) / 1e6:.0f}")
                    cells.append(f"{statistics.median(less):.2f}")
                    cells.append(f"{saved(kind, workers, framework):.2f}")
                    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
