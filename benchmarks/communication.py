"""What the exchange of gradients adds to a step, against the bare sum of as many bytes.

    python benchmarks/communication.py                                # two workers, MPI and Gloo
    python benchmarks/communication.py --frameworks tf --controllers gloo --models mlp --json found.json

Each job is a ``bench`` of one of the models of peers.py, on a CPU with one thread for each worker, where
nothing can overlap. Blocks of steps with the other workers alternate with blocks of each worker on its own:
their difference is what a step takes beside computing. Then raw_sums.py sums a buffer of as many bytes as the
gradients have by MPI_Allreduce or Gloo's call, in turn with Horovod. A row gives the medians over
the jobs, the ratio of step minus computing to the bare sum with its least and its largest, and the same ratio
of Horovod's sum. The bare sum repeats one buffer, while a step's gradients have just been written.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peer_programs
from peer_programs import DECAY, MODELS, MOMENTUM, RATE
from peers import ENVIRON

from hvdtrain.errors import EnvironmentFault
from hvdtrain.tools.launch import run_program

BYTES_OF_A_NUMBER = 4


def gradient_bytes(model: str) -> int:
    """Return the bytes of a model's gradients, which are the same in both frameworks."""
    parameters = peer_programs.Peer(model).torch_model().parameters()
    return BYTES_OF_A_NUMBER * sum(one.numel() for one in parameters)


def command(framework: str, controller: str, model: str, args: argparse.Namespace) -> list[str]:
    """Return the command of a job, without the file for what it finds."""
    fields = {
        "task_options": f"{{model: {model}}}", "momentum": MOMENTUM, "weight_decay": DECAY,
        "learning_rate": RATE, "lr_scaling": "none", "threads": 1,
    }  # fmt: skip
    job = ["-m", "hvdtrain", "bench", "--framework", framework, "--task", f"{peer_programs.__file__}:Peer"]
    job += ["--batch-size", str(MODELS[model][0]), "--seconds", str(args.seconds), "--no-all-reduce"]
    job += [word for item in fields.items() for word in ("--set", "=".join(map(str, item)))]
    return [*launcher(controller, args), *job]


def launcher(controller: str, args: argparse.Namespace) -> list[str]:
    """Return the words that start Python on each worker."""
    return ["horovodrun", f"--{controller}", "-np", str(args.workers), sys.executable]


def measured(
    framework: str, controller: str, model: str, size: int, args: argparse.Namespace
) -> dict[str, float]:
    """Run a job; return seconds of a step, of its parts, and of the sums of its gradients' bytes.

    Raises:
        EnvironmentFault: If it fails or takes longer than the limit.
    """
    with tempfile.TemporaryDirectory(prefix="communication-") as folder:
        found, sums = Path(folder, "found.json"), Path(folder, "sums.json")
        name = f"{framework} {controller} {model}"
        words = [*command(framework, controller, model, args), "--json", str(found)]
        document = run_program(name, words, args.limit, found, ENVIRON)
        words = [*launcher(controller, args), str(Path(__file__).with_name("raw_sums.py"))]
        words += ["--framework", framework, "--bytes", str(size), "--json", str(sums)]
        return figures(document, run_program(f"{name}, sums", words, args.limit, sums, ENVIRON)[0])


def figures(document: dict[str, Any], sums: dict[str, float]) -> dict[str, float]:
    """Return what a document of ``bench`` says of a job, with the sums of its gradients' bytes."""
    parts = {name: part["median"] for name, part in document["part_seconds"].items()}
    horovod, bare = sums["horovod"], sums["bare"]
    beside = parts["slowest"] + parts["communication"]
    return {
        "step": document["mean_step_seconds"]["median"], "computing": parts["compute"],
        "slowest": parts["slowest"], "communication": parts["communication"],
        "horovod": horovod, "bare": bare, "ratio": beside / bare,
        "exposed ratio": parts["communication"] / bare, "horovod ratio": horovod / bare,
    }  # fmt: skip


def row(framework: str, controller: str, model: str, size: int, found: Sequence[dict[str, float]]) -> str:
    """Return a row of the table: times in milliseconds."""
    middle = {name: statistics.median(one[name] for one in found) for name in found[0]}
    times = [
        f"{1e3 * middle[name]:.2f}" for name in ("step", "computing", "slowest", "communication", "bare")
    ]
    spreads = [
        f"{middle[name]:.2f} ({min(one[name] for one in found):.2f}-{max(one[name] for one in found):.2f})"
        for name in ("ratio", "exposed ratio", "horovod ratio")
    ]
    return "| " + " | ".join([framework, controller, model, f"{size / 1e6:.2f}", *times, *spreads]) + " |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frameworks", nargs="+", default=["torch", "tf"], choices=["torch", "tf"])
    parser.add_argument("--models", nargs="+", default=["mlp", "gpt"], choices=MODELS)
    parser.add_argument("--controllers", nargs="+", default=["mpi", "gloo"], choices=["mpi", "gloo"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3, help="jobs of each kind")
    parser.add_argument("--seconds", type=float, default=12.0, help="of training in each job")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one job")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    print(
        f"{args.workers} workers with 1 compute thread each, {args.repeat} jobs, {os.cpu_count()} cores, ms\n"
    )
    heads = [
        "framework",
        "controller",
        "model",
        "MB",
        "step",
        "computing",
        "slowest",
        "communication",
        "bare sum",
    ]
    heads += ["step minus computing / bare", "communication / bare", "Horovod's sum / bare"]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|", flush=True)
    sizes = {model: gradient_bytes(model) for model in args.models}
    rows, failed = [], 0
    for case in itertools.product(args.frameworks, args.controllers, args.models):
        try:
            found = [measured(*case, sizes[case[-1]], args) for _ in range(args.repeat)]
        except EnvironmentFault as error:
            failed += 1
            print(error, file=sys.stderr, flush=True)
            continue
        rows.append({"case": case, "bytes": sizes[case[-1]], "found": found})
        print(row(*case, sizes[case[-1]], found), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if failed:
        sys.exit(f"{failed} jobs failed")


if __name__ == "__main__":
    main()
