"""Step time of a job that sends its run to MLflow against one that does not, in turn.

    python benchmarks/tracking.py                     # two workers, PyTorch, an MLflow server on this host
    python benchmarks/tracking.py --framework tf --pairs 3
    python benchmarks/tracking.py --log-every 1       # a line for every step, which all are sent

The server is MLflow's own with a SQLite database, and takes its time of the same cores: what is measured is
the worst case of one host that does all. Jobs alternate: without, with, with, without. The step time of a job
is the median of its logged windows after the first tenth. Prints a line for each job and, at the end, the
ratio of the medians with the range over the pairs.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.mlflow_server import MlflowServer  # noqa: E402 - the tests' own, which is found just now

BATCH = 32


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--framework", choices=("torch", "tf"), default="torch")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=4)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hvdtrain-tracking-"))
    server = MlflowServer(folder, _free_port())
    times: dict[bool, list[float]] = {False: [], True: []}
    try:
        server.start()
        for pair in range(options.pairs):
            for is_tracked in (False, True) if pair % 2 == 0 else (True, False):
                found = job_milliseconds(
                    folder / f"run-{pair}-{is_tracked:d}", is_tracked, server.uri, options
                )
                times[is_tracked].append(found)
                print(f"{'with' if is_tracked else 'without'} MLflow: {found:.2f} ms a step", flush=True)
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
    ratios = sorted(tracked / alone for alone, tracked in zip(times[False], times[True], strict=True))
    alone, tracked = (statistics.median(times[is_tracked]) for is_tracked in (False, True))
    print(
        f"{options.framework}, {options.workers} workers: {alone:.2f} ms without, {tracked:.2f} ms with; "
        f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})"
    )


def job_milliseconds(run_dir: Path, is_tracked: bool, uri: str, options: argparse.Namespace) -> float:
    """Run a job; return its median step time.

    Args:
        run_dir: its run directory.
        is_tracked: whether it sends its run.
        uri: where to.
        options: those of the command line.
    """
    command = [
        "horovodrun",
        "-np",
        str(options.workers),
        sys.executable,
        "-m",
        "hvdtrain",
        "--task",
        "digits",
    ]
    command += ["--framework", options.framework, "--steps", str(options.steps), "--batch-size", str(BATCH)]
    command += ["--log-every", str(options.log_every), "--eval-every", str(options.steps)]
    command += ["--save-every", str(options.steps), "--run-dir", str(run_dir)]
    command += ["--track", "mlflow"] if is_tracked else []
    environ = {**os.environ, "MLFLOW_TRACKING_URI": uri, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    windows = [record for record in records if record["phase"] == "train"]
    speeds = [record["samples_per_second"] for record in windows[len(windows) // 10 :]]
    return 1000 * BATCH * options.workers / statistics.median(speeds)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main()
