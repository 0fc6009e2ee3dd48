"""Which jobs train a GPT under a limit of memory per worker, and what they take: sharded state and stages.

    python benchmarks/memory_limit.py
    python benchmarks/memory_limit.py --frameworks torch --limits 2400 2000

Each job trains the same GPT with AdamW, one thread per worker, and saves a checkpoint at its end; then
another one resumes it, trains as many steps more and saves. A limit is one of a cgroup for each worker
(version 1 or 2; needs root): what no file backs must fit into it, or the kernel ends the worker. Figures of
memory are what no file backs (RssAnon). The state is that of rank 0 after a step, when the C library has
given back what it keeps of freed memory, less that of a job with hardly any parameters; sums of gradients
are not there between steps with `--shard gradients`. Peaks are looked for every 5 ms, without and with the
save. P is the size of the parameters.
"""

import argparse
import ctypes
import json
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

import hvdtrain
from hvdtrain.errors import HvdtrainError

MEBIBYTE = 1 << 20
CGROUPS = Path("/sys/fs/cgroup")
# workers, --shard, --stages: multiples of P that AdamW's state takes by the formula, which knows no cuts
JOBS = {
    (1, "none", 1): 4.0,
    (2, "optimizer", 1): 3.0,
    (4, "optimizer", 1): 2.5,
    (2, "gradients", 1): 2.0,
    (4, "gradients", 1): 1.5,
    (2, "none", 2): 2.0,
}


class Watch(hvdtrain.Callback):
    """Keeps the memory after each step but the last, and the most until then."""

    def __init__(self, peak: "Peak", steps: int) -> None:
        self._steps = steps
        self.after_step = 0
        self.in_training = 0
        self._peak = peak

    def on_step(self, step, metrics) -> None:
        if step.step < self._steps:  # the last one has begun to save
            ctypes.CDLL(None).malloc_trim(0)
            self.after_step = max(self.after_step, anonymous_bytes())
            self.in_training = self._peak.bytes


class Peak(threading.Thread):
    """Looks at the memory of this process every 5 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self.start()

    def run(self) -> None:
        while True:
            self.bytes = max(self.bytes, anonymous_bytes())
            time.sleep(0.005)


def anonymous_bytes() -> int:
    """Return how much memory of this process no file backs."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def enter_cgroup(folder: Path, limit: int) -> None:
    """Move this process into a new cgroup with a limit in bytes."""
    folder.mkdir()
    is_first = (folder / "memory.limit_in_bytes").exists()
    (folder / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(limit))
    (folder / "cgroup.procs").write_text("0")


def train(framework, job, limit, folder, options) -> dict[str, int]:
    """Train as one of several workers; return what rank 0 took, and write what this one took."""
    _, shard, stages = job
    steps = options.pop("steps")
    name = f"hvdtrain-{threading.get_native_id()}"
    if limit:
        root = CGROUPS / "memory" if (CGROUPS / "memory").is_dir() else CGROUPS
        Path(folder, name).write_text(str(root / name))
        enter_cgroup(root / name, limit * MEBIBYTE)
    peak = Peak()
    watch = Watch(peak, steps)
    hvdtrain.train(
        "synthetic",
        framework=framework,
        task_options=options,
        optimizer="adamw",
        shard=shard,
        stages=stages,
        **({"accumulate": 4, "batch_size": 2} if stages > 1 else {"batch_size": 8}),
        steps=steps,
        device="cpu",
        threads=1,
        log_every=1,
        quiet=True,
        callbacks=[watch],
        run_dir=f"{folder}/run",
        resume="auto",
    )
    figures = {"state": watch.after_step, "training": watch.in_training, "peak": peak.bytes}
    Path(folder, f"{name}.json").write_text(json.dumps(figures))
    return figures


def launched(framework, job, limit, channels, args) -> tuple[dict[str, int], list[int], list[int]]:
    """Run a job and one that resumes it; return what rank 0 took and the peaks of all workers, in bytes.

    The peaks are those of both jobs, one after the other.

    Raises:
        HvdtrainError: If one ended, with what it could not do as its remedy.
    """
    options = {"model": "gpt", "layers": args.layers, "heads": 8, "context": 32, "vocabulary": 65}
    options |= {"channels": channels, "samples": 64, "eval_samples": 0}
    with tempfile.TemporaryDirectory() as folder:
        found, peaks = [], []
        try:
            for steps in (args.steps, 2 * args.steps):
                words = (framework, job, limit, folder, {**options, "steps": steps})
                found.append(hvdtrain.launch(train, np=job[0], args=words, controller=args.controller))
                files = list(Path(folder).glob("hvdtrain-*.json"))
                peaks.append(sorted(json.loads(path.read_text())["peak"] for path in files))
                for path in files:
                    path.unlink()
            return found[0], *peaks
        except HvdtrainError as error:
            metrics = Path(folder, "run", "metrics.jsonl")
            steps = metrics.read_text().count('"loss"') if metrics.exists() else 0
            error.remedy = "no memory to save" if steps >= args.steps else f"no memory after {steps} steps"
            if found:
                error.remedy = "trains and saves, no memory to resume"
            raise
        finally:
            for path in Path(folder).glob("hvdtrain-*"):
                if path.suffix != ".json":
                    with suppress(OSError):
                        Path(path.read_text()).rmdir()


def run(framework: str, job: tuple[int, str, int], limit: int, args: argparse.Namespace) -> str:
    """Run a job and return a row of the table."""
    parameters = 48 * args.layers * args.channels**2
    cells = [framework, *map(str, job), f"{limit:,}" if limit else "none"]
    try:
        found, *peaks = launched(framework, job, limit, args.channels, args)
    except HvdtrainError as error:
        return " | ".join([*cells, str(error.remedy), "", "", "", "", ""])
    cells.append("trains, saves and resumes")
    if limit:
        cells += ["", ""]
    else:
        least, *_ = launched(framework, job, 0, 8, args)
        state, expected = (found["state"] - least["state"]) / parameters, JOBS[job]
        cells.append(f"{state:.2f}")
        cells.append("" if expected is None else f"{expected:.2f} ({state / expected - 1:+.0%})")
    cells.append(f"{found['training'] >> 20:,}")
    cells += [", ".join(f"{peak >> 20:,}" for peak in of_job) for of_job in peaks]
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frameworks", nargs="+", default=["torch", "tf"], choices=["torch", "tf"])
    parser.add_argument("--controller", default="mpi", choices=["mpi", "gloo"])
    parser.add_argument("--jobs", nargs="+", type=int, default=range(len(JOBS)), help="rows of the table")
    parser.add_argument("--limits", nargs="+", type=int, default=[0], help="MiB for each worker; 0: none")
    parser.add_argument("--channels", type=int, default=1024, help="of the GPT, a multiple of 8")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    heads = ["framework", "workers", "--shard", "--stages", "limit, MiB", "ending", "state, P", "formula"]
    heads += ["rank 0 in training, MiB", "with the save, each worker, MiB", "resumed, each worker, MiB"]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for framework in args.frameworks:
        for limit in args.limits:
            for number in args.jobs:
                print(f"| {run(framework, list(JOBS)[number], limit, args)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
