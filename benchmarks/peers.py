"""Step times of hvdtrain against those of the alternatives, as whole programs that run in turn.

    python benchmarks/peers.py                                  # all: about two hours on two idle cores
    python benchmarks/peers.py --frameworks torch --controllers gloo --models mlp gpt
    python benchmarks/peers.py --load                           # with two busy processes beside
    python benchmarks/peers.py --peers flat grouped horovod --frameworks tf   # ways to reduce, by hand

Each program trains the same model with as many workers on batches of the same size, with one thread a worker,
and prints the median of its step times. hvdtrain runs whole, with its reports and checks. The peers:

- ddp: DistributedDataParallel over Gloo, by torchrun, with gradient_as_bucket_view, as in PyTorch's tutorial;
- mwms: MultiWorkerMirroredStrategy; gradients are reduced by hand, as Keras 3 has no distributed variables;
- horovod: the loop of Horovod's examples, which reduces each gradient by itself;
- grouped, flat (TensorFlow): the same loop with all gradients in one group, and in one tensor;
- plain: the loop without any reduction, one process for each worker.

A line of the table gives the median over the alternations of the ratio of two programs that ran one after the
other, and in brackets the least and the largest.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import peer_programs
from peer_programs import MODELS

PEERS = {"torch": ("ddp", "horovod"), "tf": ("mwms", "grouped")}
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


def launches(program: str, controller: str, workers: int, command: list[str]) -> list[tuple[list[str], dict]]:
    """Return the commands that make up a program's run, with what each adds to the environment."""
    if program == "ddp":
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={workers}",
        ]
        return [([*launcher, *command], {})]
    if program == "plain":
        return [([sys.executable, *command], {"HOROVOD_CONTROLLER": "gloo"})] * workers
    if program == "mwms":
        hosts = [f"127.0.0.1:{port}" for port in free_ports(workers)]
        configs = [
            {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": i}} for i in range(workers)
        ]
        return [([sys.executable, *command], {"TF_CONFIG": json.dumps(config)}) for config in configs]
    return [(["horovodrun", f"--{controller}", "-np", str(workers), sys.executable, *command], {})]


def milliseconds(
    framework: str, program: str, model: str, controller: str, args: argparse.Namespace
) -> float:
    """Run a program; return the median of rank 0's step times.

    Raises:
        RuntimeError: If it fails.
    """
    folder = tempfile.mkdtemp(prefix="peers-")
    command = [str(PROGRAM), framework, program, model, str(args.steps), folder]
    running = []
    try:
        for words, environ in launches(program, controller, args.workers, command):
            everything = {**os.environ, **ENVIRON, **environ}
            pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            running.append(subprocess.Popen(words, env=everything, text=True, **pipe))
        outputs = [one.communicate(timeout=args.limit)[0] for one in running]
    finally:
        for one in running:
            if one.poll() is None:
                one.kill()
                one.wait()
        shutil.rmtree(folder, ignore_errors=True)
    found = [
        line.partition("RESULT ")[2] for text in outputs for line in text.splitlines() if "RESULT " in line
    ]
    if not found:
        raise RuntimeError(f"{framework} {program} {model} {controller} failed:\n{''.join(outputs)[-3000:]}")
    return statistics.median(map(float, found))


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


def compare(framework: str, model: str, controller: str, args: argparse.Namespace) -> None:
    """Run hvdtrain and its peers in turn, and print a line for each peer."""
    known = (*PEERS[framework], *OTHERS[framework])
    peers = [peer for peer in known if peer in (args.peers or PEERS[framework])]
    times: dict[str, list[float]] = {program: [] for program in ("hvdtrain", *peers)}
    for _ in range(args.alternations):
        for program, found in times.items():
            found.append(milliseconds(framework, program, model, controller, args))
    mine = statistics.median(times["hvdtrain"])
    for peer in peers:
        ratios = sorted(a / b for a, b in zip(times["hvdtrain"], times[peer], strict=True))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        other = statistics.median(times[peer])
        print(
            f"| {framework} | {model} | {controller} | {mine:.2f} | {peer} | {other:.2f} | {spread} |",
            flush=True,
        )


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
        f"{args.workers} workers with 1 thread each, {args.steps} steps, {args.alternations} alternations",
        end="",
    )
    print(
        f", {'two busy processes beside, ' if args.load else ''}{os.cpu_count()} cores, load average ", end=""
    )
    print(f"{os.getloadavg()[0]:.1f} before\n")
    print("| framework | model | controller | hvdtrain ms | peer | peer ms | ratio |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with load(2 if args.load else 0):
        for framework in args.frameworks:
            for model in args.models:
                for controller in args.controllers:
                    compare(framework, model, controller, args)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
