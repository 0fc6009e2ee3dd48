"""Predictions of `plan` against measurements, on hosts whose links are limited.

    python benchmarks/plan.py                            # links of 100, 200 and 1000 Mbit/s, as root
    python benchmarks/plan.py --rates 200mbit --hosts 2 --controllers gloo --models mlp --json plan.json
    python benchmarks/plan.py --network --hosts 2        # from 2 hosts to 4, on four cores or more

The hosts are namespaces of this machine, one worker with one thread each (tests/cluster/hosts.py). They
share its cores, so the plan is made from as many workers on one of the hosts, without a limited link, as the
job has hosts. With --network it is made from a job on all hosts, over their limited links, and predicts twice
as many hosts, which needs a core for each. Then the job runs, with each way, and samples/s are compared.
Prints a row for each case, how many cases lie in their ranges, and the median error. A range that is wide
because the parts of the measured step do not explain it says little: the row has half of its width,
relative to the prediction, and the share that is not explained.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "cluster")]

WAYS = ("none", "fp16", "powersgd:4", "sync-every 10")
MODELS = {
    "mlp": "{model: mlp}",
    "convnet": "{model: convnet}",
    "gpt": "{model: gpt, layers: 4, channels: 128, heads: 4, context: 64, vocabulary: 65}",
}


def run(cluster, words: list[str], slots: str, args: argparse.Namespace) -> dict:
    """Run a command of hvdtrain below horovodrun on a cluster, and return the document that it writes."""
    workers = sum(int(host.rpartition(":")[2]) for host in slots.split(","))
    found = cluster.hostfile.parent / "found.json"
    job = ["--framework", args.framework, "--set", "threads=1", "--seconds", str(args.seconds)]
    command = [
        "horovodrun",
        f"--{args.controller}",
        "-np",
        str(workers),
        "-H",
        slots,
        "python",
        "-m",
        "hvdtrain",
    ]
    environ = {"OMPI_MCA_mpi_yield_when_idle": "1", "PYTHONPATH": str(ROOT)}
    result = cluster.head.run([*command, *words, *job, "--json", str(found)], timeout=900, **environ)
    if result.returncode != 0:
        sys.exit(f"{' '.join(words)} failed:\n{result.output[-3000:]}")
    document = json.loads(found.read_text())
    found.unlink()
    return document


def task_words(model: str) -> list[str]:
    """Return the options of a job with a model."""
    return ["--task", "synthetic", "--set", f"task_options={MODELS[model]}"]


def planned(hosts: int, way: str, args: argparse.Namespace) -> list[dict]:
    """Measure on one host, and return the predictions for one worker on each of the hosts and all links."""
    from hosts import Cluster

    with tempfile.TemporaryDirectory() as shared, Cluster({"host1": hosts}, shared=Path(shared)) as cluster:
        words = ["plan", "--hosts", str(hosts), "--slots", "1", "--link", ",".join(args.rates)]
        words += [*option(way), *task_words(args.model)]
        document = run(cluster, words, f"host1:{hosts}", args)
    return predictions(document, hosts)


def planned_over_network(hosts: int, rate: str, way: str, args: argparse.Namespace) -> list[dict]:
    """Measure over a limited link, and return the predictions for twice as many hosts."""
    from hosts import Cluster

    slots = {f"host{number}": 1 for number in range(1, hosts + 1)}
    with tempfile.TemporaryDirectory() as shared, Cluster(slots, rate=rate, shared=Path(shared)) as cluster:
        words = ["plan", "--hosts", str(2 * hosts), *option(way), *task_words(args.model)]
        document = run(cluster, words, cluster.words(), args)
    return [{**one, "link": rate} for one in predictions(document, 2 * hosts)]


def predictions(document: dict, workers: int) -> list[dict]:
    """Return a plan's predictions for a number of workers, each with what its parts do not explain."""
    error = document["measurements"][0]["unexplained"]
    return [{**one, "check": error} for one in document["predictions"] if one["workers"] == workers]


def option(way: str) -> list[str]:
    """Return the option of a job that exchanges gradients in a way."""
    return [f"--{way.split(maxsplit=1)[0]}", way.split()[1]] if " " in way else ["--compression", way]


def measured(hosts: int, rate: str, way: str, args: argparse.Namespace) -> float:
    """Return samples/s of the job with a worker on each host."""
    from hosts import Cluster

    slots = {f"host{number}": 1 for number in range(1, hosts + 1)}
    with tempfile.TemporaryDirectory() as shared, Cluster(slots, rate=rate, shared=Path(shared)) as cluster:
        words = ["bench", "--no-split", "--no-all-reduce", *option(way), *task_words(args.model)]
        document = run(cluster, words, cluster.words(), args)
    return document["samples_per_second"]["median"]


def compared(hosts: int, args: argparse.Namespace) -> list[dict]:
    """Return predictions with what was measured."""
    rows = []
    for way in WAYS:
        if args.network:
            found = [one for rate in args.rates for one in planned_over_network(hosts, rate, way, args)]
        else:
            found = planned(hosts, way, args)
        for one in found:
            rows.append(compare(one, measured(one["hosts"], one["link"], way, args), args))
            print(shown(rows[-1]), flush=True)
    return rows


def compare(one: dict, speed: float, args: argparse.Namespace) -> dict:
    """Return a prediction with the measured samples/s."""
    predicted = one["samples_per_second"]
    return {
        "framework": args.framework, "controller": args.controller, "model": args.model,
        "hosts": one["hosts"], "link": one["link"], "way": one["way"],
        "predicted": predicted, "measured": speed,
        "error": predicted["median"] / speed - 1,
        "in range": predicted["low"] <= speed <= predicted["high"],
        "half width": (predicted["high"] - predicted["low"]) / 2 / predicted["median"],
        "check": one["check"],
    }  # fmt: skip


def shown(row: dict) -> str:
    """Return a row of the table."""
    predicted = row["predicted"]
    cells = [row["framework"], row["controller"], row["model"], str(row["hosts"]), row["link"], row["way"]]
    cells.append(f"{predicted['median']:,.0f} ({predicted['low']:,.0f} to {predicted['high']:,.0f})")
    cells += [f"{row['measured']:,.0f}", f"{row['error']:+.0%}", "yes" if row["in range"] else "**no**"]
    cells += [f"{row['half width']:.0%}", f"{row['check']:.0%}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=["100mbit", "200mbit", "1000mbit"], help="of each link")
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--controllers", nargs="+", default=["gloo", "mpi"])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--frameworks", nargs="+", default=["torch", "tf"], choices=["torch", "tf"])
    parser.add_argument("--network", action="store_true", help="plan from N hosts for 2N")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    if args.network and 2 * max(args.hosts) > len(os.sched_getaffinity(0)):
        parser.error("with --network there must be a core for each of twice as many hosts")
    print(
        "| framework | controller | model | hosts | link | way | predicted samples/s | measured | error ",
        end="",
    )
    print("| in range | half its width | not explained |")
    print("|---" * 12 + "|")
    rows = []
    for case in itertools.product(args.frameworks, args.controllers, args.models, args.hosts):
        args.framework, args.controller, args.model, hosts = case
        rows += compared(hosts, args)
    errors = [abs(row["error"]) for row in rows]
    inside = sum(row["in range"] for row in rows)
    print(f"{inside} of {len(rows)} in their ranges; median error {statistics.median(errors):.0%}, ", end="")
    print(f"median of half the ranges {statistics.median(row['half width'] for row in rows):.0%}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
