"""Memory of a long run: resident memory by tenth of 100,000 steps, in one process for each framework.

    python benchmarks/growth.py                          # one worker, both frameworks
    python benchmarks/growth.py --workers 2 --steps 20000
    python benchmarks/growth.py --leak                   # keeps 750 bytes of every step, to see them

A tiny model whose learning rate changes with every step, with a moving average of the weights, samples
that are read one by one (so that seconds of waiting travel with the steps), evaluations and checkpoints.
Prints the megabytes at the end of each tenth of the steps, and the bytes that a step adds from the third
tenth on.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TENTHS = 10
FIRST = 3  # the tenth from which on memory should stay: before, arenas and caches fill


class Memory:
    """A callback that measures resident memory at the end of each tenth of the steps."""

    def __init__(self, steps: int, leak: bool, path: Path) -> None:
        self._steps, self._leak, self._path = steps, leak, path
        self._kept: list[bytes] = []
        self.megabytes: list[float] = []

    def on_step(self, step, metrics) -> None:
        """Measure, and keep 750 bytes of every step if that is asked for."""
        if self._leak:
            self._kept.append(os.urandom(750))
        if step.step % (self._steps // TENTHS) == 0:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            self.megabytes.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)

    def on_end(self, summary) -> None:
        """Write what was measured, for the process that prints it."""
        self._path.write_text(json.dumps({"megabytes": self.megabytes, "steps": summary.steps}))


class Samples:
    """Samples that are read one by one."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict:
        return {"inputs": np.full(8, index % 13 / 13, np.float32), "targets": index % 4}


class Tiny:
    """A model of a few numbers."""

    loss = "cross_entropy"

    def train_data(self):
        return Samples()

    def eval_data(self):
        return Samples()

    def torch_model(self):
        import torch

        return torch.nn.Linear(8, 4)

    def tf_model(self):
        import keras

        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])


def train(framework: str, steps: int, leak: bool, path: Path) -> None:
    """Train, in a process of its own."""
    import hvdtrain

    hvdtrain.train(
        Tiny(),
        framework=framework,
        steps=steps,
        batch_size=2,
        lr_schedule="cosine",
        warmup_steps=100,
        ema_decay=0.999,
        log_every=steps // 100,
        eval_every=steps // 4,
        save_every=steps // 4,
        threads=1,
        run_dir=str(path.with_name("run")),
        callbacks=[Memory(steps, leak, path)],
    )


def measure(framework: str, options: argparse.Namespace) -> None:
    """Print a row: the megabytes of the tenths, and what a step adds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        start = ["horovodrun", "-np", str(options.workers)] if options.workers > 1 else []
        words = ["--train", framework, "--steps", str(options.steps), "--path", str(path)]
        words += ["--leak"] if options.leak else []
        begun_seconds = time.perf_counter()
        command = [*start, sys.executable, __file__, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        seconds = time.perf_counter() - begun_seconds
        megabytes = json.loads(path.read_text())["megabytes"]
    added = (megabytes[-1] - megabytes[FIRST - 1]) * 1e6 / (options.steps * (TENTHS - FIRST) / TENTHS)
    shown = " | ".join(f"{value:.0f}" for value in megabytes)
    print(f"| {framework}, {options.workers} | {shown} | {added:.1f} | {seconds:.0f} |", flush=True)


def main() -> None:
    """Read the command line; measure, or be the process that is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--framework", choices=("torch", "tf", "both"), default="both")
    parser.add_argument("--leak", action="store_true")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.steps, options.leak, options.path)
        return
    tenths = " | ".join(f"{tenth * 10} %" for tenth in range(1, TENTHS + 1))
    print(f"| framework, workers | {tenths} | bytes a step | s |")
    print("|---" * (TENTHS + 3) + "|")
    for framework in ("torch", "tf") if options.framework == "both" else (options.framework,):
        measure(framework, options)


if __name__ == "__main__":
    main()
