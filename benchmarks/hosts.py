"""Step times of hvdtrain against those of the alternatives, between hosts whose links are limited.

    python benchmarks/hosts.py                                    # 2 hosts, 1 Gbit/s, PyTorch; as root
    python benchmarks/hosts.py --hosts 2x1 3x1 2x2 --rates 1gbit 10gbit 1gbit/5ms --frameworks torch tf
    python benchmarks/hosts.py --models vgg-like --programs hvdtrain hvdtrain-fp16 ddp ddp-fp16

The hosts are namespaces of this machine (tests/cluster/hosts.py), each with some workers of one thread.
The programs are those of peers.py; ``-fp16`` is gradients in fp16, of DistributedDataParallel by its
hook, and ``-late`` is ``overlap`` false. They run in turn, once in each round; a row gives medians over
the rounds in ms, and the median ratio of hvdtrain's time to the peer's in the same round. ``alone`` is
a step without communication (the plain loop, as many processes on one host as a host has workers),
``link`` is what the gradients take on a host's link, 2 (H - 1) / H times their bytes with the headers
of Ethernet, IP and TCP, ``rest`` what a step takes beyond the longer of both, and ``MB`` what the first
host has sent in a step. Workers share the cores of this machine: with more workers than cores, see MB
alone.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "cluster")]

from hosts import Cluster, Host, bits_per_second  # noqa: E402 - of the tests
from peer_programs import MODELS, RESULT, Peer  # noqa: E402
from peers import ENVIRON, PROGRAM  # noqa: E402

PROGRAMS = {
    "torch": ("hvdtrain", "hvdtrain-late", "hvdtrain-fp16", "ddp", "ddp-fp16"),
    "tf": ("hvdtrain", "hvdtrain-late", "mwms-free"),
}
WIRE = 1514 / 1448  # bytes on the link per byte that TCP carries
STEPS, LIMIT_SECONDS, PORT = 40, 300, 29_500


def commands(
    cluster: Cluster, controller: str, program: str, command: list[str]
) -> list[tuple[Host, list[str]]]:
    """Return what runs on which host; the first on the head."""
    hosts = list(cluster.hosts.values())
    if program.startswith("hvdtrain"):
        workers = str(sum(host.slots for host in hosts))
        return [
            (hosts[0], ["horovodrun", f"--{controller}", "-np", workers, "-H", cluster.words(), *command])
        ]
    if program == "plain":
        return [(hosts[0], ["env", "HOROVOD_CONTROLLER=gloo", *command])] * hosts[0].slots
    if program.startswith("ddp"):
        return [
            (
                host,
                [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}", f"--node-rank={i}",
                 f"--nproc-per-node={host.slots}", f"--master-addr={hosts[0].address}",
                 f"--master-port={PORT}", *command[1:]],
            )
            for i, host in enumerate(hosts)
        ]  # fmt: skip
    places = [(host, f"{host.address}:{PORT + i}") for host in hosts for i in range(host.slots)]
    cluster_of = {"worker": [address for _, address in places]}
    configs = [json.dumps({"cluster": cluster_of, "task": {"type": "worker", "index": i}})
               for i in range(len(places))]  # fmt: skip
    free = ["-u", "TF_NUM_INTEROP_THREADS"]
    return [
        (host, ["env", *free, f"TF_CONFIG={config}", *command])
        for (host, _), config in zip(places, configs, strict=True)
    ]


def measure(
    cluster: Cluster, framework: str, controller: str, program: str, model: str
) -> tuple[float, float]:
    """Return the median ms of a step, and the MB that the first host sent for one."""
    with tempfile.TemporaryDirectory(dir=cluster.hostfile.parent) as folder:
        command = [sys.executable, str(PROGRAM), framework, program, model, str(STEPS), folder]
        environ = {**ENVIRON, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0"}
        del environ["OMPI_MCA_mpi_yield_when_idle"]  # as hvdtrain sets it
        before = cluster.head.sent_bytes()
        with contextlib.ExitStack() as stack:
            jobs = [
                stack.enter_context(host.started(words, **environ))
                for host, words in commands(cluster, controller, program, command)
            ]
            results = [job.wait(LIMIT_SECONDS) for job in jobs]
        found = Path(folder) / RESULT
        if any(result.returncode for result in results) or not found.is_file():
            sys.exit(f"{framework} {program} {model} failed:\n{results[0].output[-3000:]}")
        return float(found.read_text()), (cluster.head.sent_bytes() - before) / STEPS / 1e6


def gradient_bytes(framework: str, model: str) -> int:
    """Return the bytes of a model's gradients in fp32."""
    made = getattr(Peer(model), f"{framework}_model")()
    if framework == "torch":
        return sum(4 * parameter.numel() for parameter in made.parameters())
    return sum(4 * int(variable.shape.num_elements()) for variable in made.trainable_variables)


def compare(cluster: Cluster, name: str, framework: str, model: str, args: argparse.Namespace) -> None:
    """Run all programs in turn and print a row for each of hvdtrain's controllers and peers."""
    hosts, rate = len(cluster.hosts), name.rpartition(" ")[2].partition("/")[0]
    link = 2 * (hosts - 1) / hosts * gradient_bytes(framework, model) * WIRE * 8e3 / bits_per_second(rate)
    chosen = [one for one in PROGRAMS[framework] if one in args.programs]
    runs = [(p, c) for p in chosen for c in (args.controllers if p.startswith("hvdtrain") else ("",))]
    times: dict[tuple[str, str], list[tuple[float, float]]] = {run: [] for run in runs}
    alone = measure(cluster, framework, "", "plain", model)[0]
    for turn in range(args.rounds):
        for program, controller in runs if turn % 2 == 0 else reversed(runs):
            found = measure(cluster, framework, controller, program, model)
            times[program, controller].append(found)
    for program, controller in runs:
        ms, sent = (statistics.median(column) for column in zip(*times[program, controller], strict=True))
        peers = [p for p in chosen if not p.startswith("hvdtrain")] if program.startswith("hvdtrain") else []
        ratios = {
            peer: statistics.median(
                a / b for (a, _), (b, _) in zip(times[program, controller], times[peer, ""], strict=True)
            )
            for peer in peers
        }
        bytes_ms = link / 2 if program.endswith("fp16") else link
        rest = ms - max(alone, bytes_ms)
        shown = ", ".join(f"{ratio:.2f} of {peer}" for peer, ratio in ratios.items())
        cells = [name, framework, model, program, controller or "-", f"{ms:.0f}", f"{alone:.0f}",
                 f"{bytes_ms:.0f}", f"{rest:.0f}", f"{sent:.1f}", shown]  # fmt: skip
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", nargs="+", default=["2x1"], help="hosts x workers on each")
    parser.add_argument("--rates", nargs="+", default=["1gbit"], help="of each link, as tc writes it; /DELAY")
    parser.add_argument("--frameworks", nargs="+", default=["torch"], choices=list(PROGRAMS))
    parser.add_argument("--controllers", nargs="+", default=["gloo", "mpi"], choices=["gloo", "mpi"])
    parser.add_argument("--models", nargs="+", default=[m for m in MODELS if m != "narrow"], choices=MODELS)
    parser.add_argument("--programs", nargs="+", default=sorted({*PROGRAMS["torch"], *PROGRAMS["tf"]}))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{STEPS} steps, {args.rounds} rounds, load average {os.getloadavg()[0]:.1f} before\n")
    print("| hosts, link | framework | model | program | over | ms | alone | link | rest | MB | ratio |")
    print("|---" * 11 + "|", flush=True)
    for topology in args.hosts:
        hosts, workers = map(int, topology.split("x"))
        for limit in args.rates:
            rate, _, delay = limit.partition("/")
            with tempfile.TemporaryDirectory() as shared:
                slots = {f"host{i + 1}": workers for i in range(hosts)}
                with Cluster(slots, rate=rate, delay=delay or None, shared=Path(shared)) as cluster:
                    for framework in args.frameworks:
                        for model in args.models:
                            compare(cluster, f"{topology}, {limit}", framework, model, args)


if __name__ == "__main__":
    main()
