"""What waiting costs in a split model: the pipeline's bubble against its formula, and its speed.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --frameworks torch --stages 2 --channels 128

A GPT trains with one worker, and with its stages on as many workers, with 1, 2, 4 and more micro-batches in a
step; each job runs as a whole, one thread per worker. With M micro-batches and K stages a step is to take
(M + K - 1) times as long as one micro-batch; how long that is follows from the jobs with most micro-batches.
Times mean something where every worker has a core.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time

import hvdtrain

OPTIONS = {"model": "gpt", "layers": 8, "heads": 4, "context": 64, "vocabulary": 65}
SKIPPED = 3  # first steps, which compile and allocate


class Watch(hvdtrain.Callback):
    """Keeps times of steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._before = time.perf_counter()

    def on_step(self, step, metrics) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._before)
        self._before = now


def train(framework: str, stages: int, micro_batches: int, args: argparse.Namespace, run_dir: str) -> float:
    """Train as one of several workers; return the median step in seconds on rank 0, and 0 on others."""
    watch = Watch()
    hvdtrain.train(
        "synthetic",
        framework=framework,
        task_options={**OPTIONS, "channels": args.channels, "eval_samples": 0},
        optimizer="adamw",
        stages=stages,
        accumulate=micro_batches,
        steps=args.steps,
        batch_size=args.batch_size,
        device="cpu",
        threads=1,
        log_every=1000,
        quiet=True,
        callbacks=[watch],
        run_dir=run_dir,
    )
    return statistics.median(watch.seconds[SKIPPED:]) if watch.seconds else 0.0


def measured(framework: str, args: argparse.Namespace) -> dict[tuple[int, int], float]:
    """Return the median step by the number of stages and of micro-batches; kinds of jobs alternate."""
    found: dict[tuple[int, int], list[float]] = {}
    for _, count, stages in itertools.product(range(args.repeat), args.micro_batches, (1, args.stages)):
        with tempfile.TemporaryDirectory() as folder:
            words = (framework, stages, count, args, f"{folder}/run")
            seconds = hvdtrain.launch(train, np=stages, args=words, controller="mpi")
            found.setdefault((stages, count), []).append(seconds)
    return {key: statistics.median(values) for key, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frameworks", nargs="+", default=["torch", "tf"], choices=["torch", "tf"])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a micro-batch")
    parser.add_argument("--channels", type=int, default=128, help="of the GPT, a multiple of 4")
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--repeat", type=int, default=2)
    args = parser.parse_args()
    print("| framework | micro-batches | step, ms | bubble | formula | of one worker's speed |")
    print("|---" * 6 + "|")
    for framework in args.frameworks:
        seconds = measured(framework, args)
        most, less = sorted(args.micro_batches)[-1], sorted(args.micro_batches)[-2]
        slope = (seconds[args.stages, most] - seconds[args.stages, less]) / (most - less)
        for count in args.micro_batches:
            step = seconds[args.stages, count]
            cells = [framework, count, f"{step * 1e3:.0f}", f"{1 - count * slope / step:.0%}"]
            cells.append(f"{(args.stages - 1) / (count + args.stages - 1):.0%}")
            cells.append(f"**{seconds[1, count] / step:.2f}**")
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
