"""Run the same twelve jobs in four trainers, one after the other, and print lines of user code and seconds.

    python benchmarks/first_jobs/compare.py --python VENV/bin/python

The other python is that of an environment with lightning, accelerate, torchmetrics and tensorboard. Lines are
those of a job's function, without blank ones; for "train", all that the other jobs share. Two workers; Keras
has one process. Seconds are those of the command and those of all its processes on the CPU.
"""

import argparse
import ast
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRAINERS = ("lightning", "accelerate", "keras", "hvdtrain")
JOBS = ["train", "f1", "schedule", "best", "resume", "early_stopping", "class_weights", "average"]
JOBS += ["learning_rate", "contrastive", "pictures", "serve"]


def lines_of(trainer: str) -> dict[str, int]:
    """Return the lines of user code of each job."""
    text = (HERE / f"with_{trainer}.py").read_text()
    rows, counts = text.splitlines(), {"train": 0}
    for part in ast.parse(text).body:
        count = sum(bool(row.strip()) for row in rows[part.lineno - 1 : part.end_lineno])
        if isinstance(part, ast.FunctionDef) and part.name in JOBS:
            counts[part.name] = counts.get(part.name, 0) + count
        elif isinstance(part, ast.FunctionDef | ast.ClassDef):
            counts["train"] += count
    return counts


def run(trainer: str, job: str, other: str, folder: Path) -> tuple[float, float, str]:
    """Run a job; return its seconds, the seconds of the CPU and its result."""
    starts = {
        "lightning": [other],
        "accelerate": [other, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
        "keras": [other],
        "hvdtrain": ["horovodrun", "-np", "1" if job == "learning_rate" else "2", sys.executable],
    }
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [*starts[trainer], str(HERE / f"with_{trainer}.py"), job]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    results = [line for line in done.stdout.splitlines() if "{" in line and "result:" in line]
    if done.returncode or not results:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu, results[-1].partition("result:")[2].strip()


def main() -> None:
    """Run the jobs and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True, help="python of the environment of the other trainers")
    other = parser.parse_args().python
    counts = {trainer: lines_of(trainer) for trainer in TRAINERS}
    print("| job | " + " | ".join(f"{trainer}: lines, s (CPU s)" for trainer in TRAINERS) + " |")
    with tempfile.TemporaryDirectory() as folder:
        for trainer in TRAINERS:
            (Path(folder) / trainer).mkdir()
        for job in JOBS:
            cells = []
            for trainer in TRAINERS:
                if job not in counts[trainer]:
                    cells.append("by hand")
                    continue
                seconds, cpu, result = run(trainer, job, other, Path(folder) / trainer)
                cells.append(f"{counts[trainer][job]}, {seconds:.0f} ({cpu:.0f})")
                print(f"{job} {trainer}: {result}", file=sys.stderr)
            print(f"| {job} | {' | '.join(cells)} |", flush=True)
        print(f"| all | {' | '.join(str(sum(counts[trainer].values())) for trainer in TRAINERS)} |")


if __name__ == "__main__":
    main()
