"""Step time with compression against none, between two hosts whose links are limited.

    python benchmarks/network.py                       # 200 Mbit/s, both frameworks; as root
    python benchmarks/network.py --rate 50mbit --frameworks torch --steps 20
    python benchmarks/network.py --compression powersgd:4 --width 1700  # a perceptron of 6 M parameters

The hosts are namespaces of this machine, one worker with one thread each (tests/cluster/hosts.py).
A ring all-reduce of n workers sends 2 (n - 1) / n times the gradient's bytes from each; the predicted
time of a step is what they take on the wire, Ethernet's, IP's and TCP's headers included, and the step
without a limit on top, with its own compression. Prints a table, and writes it as JSON with --json.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "cluster")]

WORKERS, BATCH, WARM = 2, 32, 3
BYTES = {"none": 4, "fp16": 2, "bf16": 2}  # of a number
WIRE = 1514 / 1448  # bytes on the link, as tbf counts them, per byte that TCP carries
_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


class Bench:
    """Random inputs and a perceptron with hidden layers of some width."""

    loss = "cross_entropy"

    def __init__(self, width: int = 1000) -> None:
        self.width = width

    def train_data(self):
        random = np.random.RandomState(0)
        return random.rand(2048, 64).astype(np.float32), random.randint(0, 10, 2048)

    def eval_data(self):
        return None

    def torch_model(self):
        from torch import nn

        width = self.width
        layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    def tf_model(self):
        from keras import Input, Sequential, layers

        hidden = [layers.Dense(self.width, activation="relu") for _ in range(3)]
        return Sequential([Input((64,)), *hidden, layers.Dense(10)])


def parameters(width: int) -> int:
    """Count the parameters of the model."""
    return 64 * width + width + 2 * (width * width + width) + 10 * width + 10


def gradient_bytes(width: int, compression: str) -> float:
    """Return the bytes of a step's gradients as they travel."""
    if compression in BYTES:
        return parameters(width) * BYTES[compression]
    rank = int(compression.partition(":")[2])
    return 4 * (rank * (64 + width + 2 * 2 * width + width + 10) + 3 * width + 10)


def predicted_seconds(width: int, compression: str, rate: str) -> float:
    """Return what the gradients of a step take on the wire."""
    from hosts import bits_per_second

    sent = 2 * (WORKERS - 1) / WORKERS * gradient_bytes(width, compression)
    return sent * WIRE * 8 / bits_per_second(rate)


def worker(framework: str, compression: str, width: int, steps: int, run_dir: str) -> None:
    """Train, and print the median seconds of a step on rank 0, and the bytes that its host sent for it."""
    from hvdtrain import train

    marks: list[tuple[float, int]] = []

    class StepTimer:  # called on rank 0 only
        def on_step(self, step, metrics):
            marks.append((time.perf_counter(), int(_SENT.read_text())))

    train(
        f"{__file__}:Bench", framework=framework, steps=steps + WARM, batch_size=BATCH,
        compression=compression, task_options={"width": width}, threads=1, log_every=1000,
        save_every=None, eval_every=None, check_replicas_every=100_000, run_dir=run_dir,
        callbacks=[StepTimer()],
    )  # fmt: skip
    if marks:
        seconds, sent = np.diff(marks[WARM:], axis=0).T
        print("RESULT " + json.dumps({"seconds": np.median(seconds), "bytes": np.median(sent)}), flush=True)


def measure(cluster, controller: str, framework: str, compression: str, args: argparse.Namespace) -> dict:
    """Return the median seconds of a step on the cluster, and the bytes that a host sent for it."""
    words = ["horovodrun", f"--{controller}", "-np", str(WORKERS), "-H", cluster.words(), "python", __file__]
    words += ["--worker", compression, "--frameworks", framework, "--width", str(args.width)]
    environ = {"OMPI_MCA_mpi_yield_when_idle": "1", "PYTHONPATH": str(ROOT)}
    words += ["--steps", str(args.steps), "--run-dir", str(cluster.hostfile.parent / compression)]
    result = cluster.head.run(words, timeout=600, **environ)
    lines = [line.partition("RESULT ")[2] for line in result.stdout.splitlines() if "RESULT " in line]
    if result.returncode != 0 or not lines:
        sys.exit(f"{' '.join(words)} failed:\n{result.output[-3000:]}")
    return json.loads(lines[0])


def compared(controller: str, framework: str, args: argparse.Namespace) -> dict:
    """Measure a framework with and without compression, with a limit and without."""
    from hosts import Cluster

    row = {"controller": controller, "framework": framework, "parameters": parameters(args.width)}
    for rate in (None, args.rate):
        with tempfile.TemporaryDirectory() as shared:
            slots = {"host1": 1, "host2": 1}
            with Cluster(slots, rate=rate, shared=Path(shared)) as cluster:
                for compression in ("none", args.compression):
                    found = measure(cluster, controller, framework, compression, args)
                    row[f"{compression}, {'unlimited' if rate is None else 'limited'}"] = found["seconds"]
                    row[f"{compression}, MB sent"] = found["bytes"] / 1e6
    for compression in ("none", args.compression):
        wire = predicted_seconds(args.width, compression, args.rate)
        row[f"{compression}, predicted"] = wire + row[f"{compression}, unlimited"]
    row["ratio"] = row[f"{args.compression}, limited"] / row["none, limited"]
    row["predicted ratio"] = row[f"{args.compression}, predicted"] / row["none, predicted"]
    return row


COLUMNS = ("MB sent", "unlimited", "limited", "predicted")


def shown(row: dict, compression: str) -> str:
    """Return a row of the table; times in milliseconds."""
    cells = [row["controller"], row["framework"]]
    for one in ("none", compression):
        sent, *seconds = (row[f"{one}, {column}"] for column in COLUMNS)
        cells += [f"{sent:.2f}", *(f"{value * 1e3:.0f}" for value in seconds)]
    return "| " + " | ".join([*cells, f"{row['ratio']:.2f}", f"{row['predicted ratio']:.2f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="200mbit", help="what each link carries each way, as tc writes it")
    parser.add_argument("--controllers", nargs="+", default=["gloo", "mpi"])
    parser.add_argument("--frameworks", nargs="+", default=["torch", "tf"])
    parser.add_argument("--compression", default="fp16", help="what is compared with none")
    parser.add_argument("--width", type=int, default=1000, help="of the model's three hidden layers")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--run-dir", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.frameworks[0], args.worker, args.width, args.steps, args.run_dir)
        return
    print(
        f"{WORKERS} hosts, {args.rate} each way, {parameters(args.width):,} parameters, batch {BATCH} each; "
        f"medians of {args.steps} steps, in ms; MB sent by a host for a step"
    )
    titles = [f"{one}: {column}" for one in ("none", args.compression) for column in COLUMNS]
    print(
        "| "
        + " | ".join(["controller", "framework", *titles, f"{args.compression} / none", "predicted"])
        + " |"
    )
    print("|---" * (4 + len(titles)) + "|")
    rows = []
    for controller in args.controllers:
        for framework in args.frameworks:
            rows.append(compared(controller, framework, args))
            print(shown(rows[-1], args.compression), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"rate": args.rate, "steps": args.steps, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
