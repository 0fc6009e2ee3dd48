"""Step times of hvdtrain against those of the alternatives, as whole programs that run in turn.

    python benchmarks/peers.py                                  # all: about three hours on two idle cores
    python benchmarks/peers.py --frameworks torch --controllers gloo --models mlp gpt
    python benchmarks/peers.py --load                           # with two busy processes beside
    python benchmarks/peers.py --peers flat grouped horovod --frameworks tf   # ways to reduce, by hand

Each program trains the same model with as many workers on batches of the same size, with one compute thread a
worker, and writes the median of its step times. hvdtrain runs whole, with its reports and checks. The peers:

- ddp: DistributedDataParallel over Gloo, by torchrun, with gradient_as_bucket_view, as in PyTorch's tutorial;
- mwms: MultiWorkerMirroredStrategy; gradients are reduced by hand, as Keras 3 has no distributed variables;
  with one inter-op thread it cannot communicate while it computes;
- mwms-free: the same with as many inter-op threads as TensorFlow chooses;
- horovod: the loop of Horovod's examples, which reduces each gradient by itself;
- grouped, flat (TensorFlow): the same loop with all gradients in one group, and in one tensor;
- plain: the loop without any reduction, one process for each worker.

PyTorch's peers read their data within the step, with a DataLoader without workers, as its tutorials do: that
takes 0.04 to 0.1 ms for a batch. hvdtrain reads ahead in two threads, and tf.data in one of its own. Horovod,
Gloo and MPI have threads of their own, too.

hvdtrain runs once beside each run of a peer; every other time the peer comes first. A line of the table gives
the median over these pairs of the ratio of both, and in brackets the least and the largest. A program that
fails, or takes longer than --limit, ends its comparison, and the exit code is 1.
"""

import argparse
import contextlib
import itertools
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import peer_programs
from peer_programs import FREE, MODELS, RESULT

from hvdtrain.errors import EnvironmentFault
from hvdtrain.tools.launch import run_program

PEERS = {"torch": ("ddp", "horovod"), "tf": ("mwms", "mwms-free", "grouped")}
OTHERS = {"torch": ("plain",), "tf": ("horovod", "flat", "plain")}
PROGRAM = Path(peer_programs.__file__)
ENVIRON = {
    "OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}  # fmt: skip


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nobody uses."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def launches(program: str, controller: str, workers: int, command: list[str]) -> list[list[str]]:
    """Return the commands that make up a program's run; each begins with what it adds to the environment."""
    if program == "ddp":
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={workers}",
        ]
        return [[*launcher, *command]]
    if program == "plain":
        return [["env", "HOROVOD_CONTROLLER=gloo", sys.executable, *command]] * workers
    if program.startswith("mwms"):
        hosts = [f"127.0.0.1:{port}" for port in free_ports(workers)]
        configs = [
            {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": i}} for i in range(workers)
        ]
        environ = ["-u", "TF_NUM_INTEROP_THREADS"] if program.endswith(FREE) else []
        return [
            ["env", *environ, f"TF_CONFIG={json.dumps(config)}", sys.executable, *command]
            for config in configs
        ]
    return [["horovodrun", f"--{controller}", "-np", str(workers), sys.executable, *command]]


def milliseconds(
    framework: str, program: str, model: str, controller: str, args: argparse.Namespace
) -> float:
    """Run a program; return the median of rank 0's step times. Nothing of it is left running.

    Raises:
        EnvironmentFault: If it fails, or takes longer than the limit.
    """
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as folder:
        command = [str(PROGRAM), framework, program, model, str(args.steps), folder]
        commands = launches(program, controller, args.workers, command)
        name = f"{framework} {program} {model} {controller}"
        words = commands[0]
        if len(commands) > 1:
            waits = "; ".join(["wait -n || exit"] * len(commands))  # the first that fails ends the others
            words = ["bash", "-c", f"{' & '.join(map(shlex.join, commands))} & {waits}"]
        return float(run_program(name, words, args.limit, Path(folder) / RESULT, ENVIRON))


@contextlib.contextmanager
def load(count: int) -> Iterator[None]:
    """Context with so many processes beside that compute without an end."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def compare(framework: str, peer: str, model: str, controller: str, args: argparse.Namespace) -> None:
    """Run hvdtrain and a peer in turn, every other time the peer first, and print a line.

    Raises:
        EnvironmentFault: If one of them fails.
    """
    times: dict[str, list[float]] = {"hvdtrain": [], peer: []}
    for turn in range(args.alternations):
        for program in times if turn % 2 == 0 else reversed(times):
            times[program].append(milliseconds(framework, program, model, controller, args))
    ratios = sorted(a / b for a, b in zip(times["hvdtrain"], times[peer], strict=True))
    mine, other = (statistics.median(found) for found in times.values())
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
    print(
        f"| {framework} | {model} | {controller} | {mine:.2f} | {peer} | {other:.2f} | {spread} |", flush=True
    )


def compare_all(args: argparse.Namespace) -> int:
    """Compare all that the arguments ask for; return how many comparisons failed."""
    failed = 0
    for framework in args.frameworks:
        known = (*PEERS[framework], *OTHERS[framework])
        peers = [peer for peer in known if peer in (args.peers or PEERS[framework])]
        for model, controller, peer in itertools.product(args.models, args.controllers, peers):
            try:
                compare(framework, peer, model, controller, args)
            except EnvironmentFault as error:
                failed += 1
                print(error, file=sys.stderr, flush=True)
    return failed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frameworks", nargs="+", default=["torch", "tf"], choices=["torch", "tf"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--controllers", nargs="+", default=["mpi", "gloo"], choices=["mpi", "gloo"])
    parser.add_argument("--peers", nargs="+", help="in place of the usual ones of each framework")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--alternations", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one program")
    parser.add_argument("--load", action="store_true", help="with two busy processes beside")
    args = parser.parse_args()
    began = time.perf_counter()
    print(
        f"{args.workers} workers with 1 compute thread each, {args.steps} steps, {args.alternations} pairs",
        end="",
    )
    print(
        f", {'two busy processes beside, ' if args.load else ''}{os.cpu_count()} cores, load average ", end=""
    )
    print(f"{os.getloadavg()[0]:.1f} before\n")
    print("| framework | model | controller | hvdtrain ms | peer | peer ms | ratio |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with load(2 if args.load else 0):
        failed = compare_all(args)
    print(f"\n{time.perf_counter() - began:.0f} s")
    if failed:
        sys.exit(f"{failed} comparisons failed")


if __name__ == "__main__":
    main()
