"""The forecast of a job's memory against the most that its workers have had.

    python benchmarks/memory.py                                  # all: about ten minutes on two cores
    python benchmarks/memory.py --frameworks torch --models gpt --settings plain shard

Each job trains one of the models of ``peers.py`` for some steps, with one thread a worker, and saves a
checkpoint in the end. The forecast is the sum in the line "memory" of its plan, which is there before the
first step; the peak is ``peak_memory_mib`` of its summary, the largest over the workers. Less than 0 % means
that the forecast is too low.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import peer_programs
from peer_programs import MODELS
from peers import ENVIRON

TARGET = 0.1
TASK = f"{peer_programs.__file__}:Peer"
# workers, and what differs from a job with sgd and momentum, in fp32
SETTINGS = {
    "plain": (1, {}),
    "accumulate": (1, {"accumulate": 2}),
    "adamw-ema": (1, {"optimizer": "adamw", "ema_decay": 0.999}),
    "shard": (2, {"optimizer": "adamw", "shard": "optimizer"}),
}
# of models with repeated blocks
OTHERS = {"checkpoint": (1, {"checkpoint_activations": True}), "bf16": (1, {"precision": "bf16"})}
_FORECAST = re.compile(r"\bmemory\s+at least ([\d,.]+) MiB per worker: (.*)")


def measure(framework: str, model: str, setting: str, args: argparse.Namespace) -> tuple[float, float, str]:
    """Train; return the forecast and the peak in MiB, and the parts of the forecast.

    Raises:
        subprocess.SubprocessError: If the job fails or takes longer than the limit.
    """
    workers, fields = {**SETTINGS, **OTHERS}[setting]
    batch, *_ = MODELS[model]
    with tempfile.TemporaryDirectory(prefix="memory-", ignore_cleanup_errors=True) as folder:
        config = {
            "framework": framework,
            "task": TASK,
            "task_options": {"model": model},
            "steps": args.steps,
            "batch_size": batch,
            "learning_rate": 1e-3,
            "eval_every": None,
            "threads": 1,
            "run_dir": f"{folder}/run",
            "log_every": args.steps,
            **fields,
        }
        path = Path(folder, "config.yaml")
        path.write_text(json.dumps(config))  # which is YAML, too
        launcher = ["horovodrun", "--gloo", "-np", str(workers)] if workers > 1 else []
        done = subprocess.run(
            [*launcher, sys.executable, "-m", "hvdtrain", str(path)], check=True, text=True,
            capture_output=True, timeout=args.limit, env={**os.environ, **ENVIRON},
        )  # fmt: skip
        found = _FORECAST.search(done.stdout)
        assert found is not None, done.stdout
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        return float(found[1].replace(",", "")), summary["peak_memory_mib"], found[2]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frameworks", nargs="+", default=["torch"], choices=["torch", "tf"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=[*SETTINGS, *OTHERS])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit", type=float, default=180, help="seconds for one job")
    parser.add_argument("--parts", action="store_true", help="print the parts of each forecast")
    args = parser.parse_args()
    began, errors = time.perf_counter(), []
    print(
        "| framework | model | setting | forecast MiB | peak MiB | error |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for framework, model, setting in itertools.product(args.frameworks, args.models, args.settings):
        try:
            forecast, peak, parts = measure(framework, model, setting, args)
        except subprocess.SubprocessError as error:
            print(f"{framework} {model} {setting}: {error}", file=sys.stderr, flush=True)
            errors.append(float("inf"))
            continue
        errors.append(forecast / peak - 1)
        print(
            f"| {framework} | {model} | {setting} | {forecast:,.0f} | {peak:,.0f} | {errors[-1]:+.1%} |",
            flush=True,
        )
        if args.parts:
            print(f"  {parts}", flush=True)
    sizes = sorted(map(abs, errors))
    within = sum(size <= TARGET for size in sizes)
    spread = f"median {statistics.median(sizes):.1%}, largest {sizes[-1]:.1%}"
    print(f"\n{within} of {len(sizes)} within {TARGET:.0%}; {spread}")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
