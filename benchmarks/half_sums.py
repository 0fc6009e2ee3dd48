"""Sums over workers of fp32, fp16 and bf16 numbers, in turn, as gradients are summed with ``--compression``.

    horovodrun --gloo -np 2 python benchmarks/half_sums.py --framework torch --numbers 7000000

``sum`` is Horovod's all-reduce alone; ``gradients`` also multiplies fp32 numbers by the number of workers,
rounds them, and makes the sums fp32 again, in PyTorch in memory that stays. ``by parts`` sums bf16 as builds
of Horovod can that have no such type: an all-to-all of parts, their sums in fp32, an all-gather. Figures are
medians on the slowest worker. With ``--check``, sums of two workers are compared with those of PyTorch.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from hvdtrain.host.frameworks import FRAMEWORKS

Call = tuple[Callable[[], object], Callable[[], object]]  # what prepares, and what is timed
KINDS = ("float16", "bfloat16")


def torch_calls(values: np.ndarray, sums_bf16: bool) -> dict[str, Call]:
    """Return what is timed with PyTorch, by name."""
    torch, hvd = import_module("torch"), import_module("horovod.torch")
    flat_zeros = import_module("hvdtrain.backends.torch.reduction.flat").flat_zeros
    given = torch.from_numpy(values)
    numbers = flat_zeros(len(given), torch.float32, given.device).copy_(given)
    size = hvd.size()

    def reduce(tensor: Any, name: str, **options: float) -> None:
        hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum, name=name, **options))

    def reduce_gradients(small: Any, name: str) -> None:
        small.copy_(numbers.mul_(size))
        reduce(small, name, postscale_factor=1 / size)
        numbers.copy_(small)

    def by_parts() -> None:
        padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % size)).to(torch.bfloat16)
        parts = hvd.alltoall(padded.view(torch.int16), name="parts").view(torch.bfloat16).view(size, -1)
        own = parts.float().sum(0).to(torch.bfloat16).view(torch.int16)
        numbers.copy_(hvd.allgather(own, name="parts.sum").view(torch.bfloat16)[: len(numbers)])

    def refill() -> None:
        numbers.copy_(given)

    calls: dict[str, Call] = {"float32 sum": (refill, lambda: reduce(numbers, "float32"))}
    for kind in KINDS[: 1 + sums_bf16]:
        small = flat_zeros(len(given), getattr(torch, kind), given.device).copy_(given)
        first = small.clone()
        calls[f"{kind} sum"] = (
            lambda small=small, first=first: small.copy_(first),
            lambda small=small, kind=kind: reduce(small, kind),
        )
        calls[f"{kind} gradients"] = (
            refill,
            lambda small=small, kind=kind: reduce_gradients(small, f"{kind}.gradients"),
        )
    calls["bfloat16 by parts"] = (refill, by_parts)
    return calls


def tensorflow_calls(values: np.ndarray, sums_bf16: bool) -> dict[str, Call]:
    """Return what is timed with TensorFlow, by name."""
    tf, hvd = import_module("tensorflow"), import_module("horovod.tensorflow")
    given = tf.constant(values)
    size, length = hvd.size(), len(values)

    def reduce_gradients(kind: Any) -> Any:
        small = tf.cast(given * size, kind)
        total = hvd.allreduce(small, op=hvd.Sum, name=f"{kind.name}.gradients", postscale_factor=1 / size)
        return tf.cast(total, tf.float32)

    def by_parts() -> Any:
        padded = tf.cast(tf.pad(given, [[0, -length % size]]), tf.bfloat16)
        received = tf.bitcast(hvd.alltoall(tf.bitcast(padded, tf.int16), name="parts"), tf.bfloat16)
        own = tf.reduce_sum(tf.cast(tf.reshape(received, [size, -1]), tf.float32), 0)
        gathered = hvd.allgather(tf.bitcast(tf.cast(own, tf.bfloat16), tf.int16), name="parts.sum")
        return tf.cast(tf.bitcast(gathered, tf.bfloat16), tf.float32)[:length]

    def call(function: Callable[..., Any], *arguments: Any) -> Call:
        compiled = tf.function(function, autograph=False)
        return lambda: None, lambda: compiled(*arguments)

    calls = {"float32 sum": call(lambda: hvd.allreduce(given, op=hvd.Sum, name="float32"))}
    for kind in map(tf.as_dtype, KINDS[: 1 + sums_bf16]):
        small = tf.cast(given, kind)
        calls[f"{kind.name} sum"] = call(
            lambda small=small: hvd.allreduce(small, op=hvd.Sum, name=small.dtype.name)
        )
        calls[f"{kind.name} gradients"] = call(lambda kind=kind: reduce_gradients(kind))
    calls["bfloat16 by parts"] = call(by_parts)
    return calls


def check(hvd: Any, gather: Callable[[Any], list[Any]], count: int) -> None:
    """Compare sums of two workers with PyTorch's, bit by bit but for what is not a number."""
    torch = import_module("torch")
    for kind in map(torch.__getattribute__, KINDS):
        bits = np.random.default_rng(hvd.rank()).integers(-(2**15), 2**15, count, np.int16)
        own = torch.from_numpy(bits).view(kind)
        first, second = (torch.from_numpy(one).view(kind).float() for one in gather(bits))
        expected = (first + second).to(kind)
        found = hvd.allreduce(own, op=hvd.Sum, name=f"check.{kind}")
        same = (found.view(torch.int16) == expected.view(torch.int16)) | (found.isnan() & expected.isnan())
        print(f"rank {hvd.rank()}: {kind}: {count - int(same.sum())} of {count:,} sums differ", flush=True)


def main() -> None:
    """Measure; rank 0 prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--framework", choices=list(FRAMEWORKS), default="torch")
    parser.add_argument("--numbers", type=int, default=7_000_000)
    parser.add_argument("--repeats", type=int, default=15, help="of each, in turn")
    parser.add_argument("--no-bf16", action="store_true", help="for a build of Horovod that has no such type")
    parser.add_argument("--check", action="store_true", help="compare sums of two workers with PyTorch's")
    args = parser.parse_args()
    module = FRAMEWORKS[args.framework].horovod
    hvd = import_module(module)
    gather = import_module(f"{module}.functions").allgather_object
    hvd.init()
    if args.check:
        check(hvd, gather, args.numbers)
        return
    values = np.random.default_rng(hvd.rank()).normal(0, 1e-2, args.numbers).astype(np.float32)
    calls = (torch_calls if args.framework == "torch" else tensorflow_calls)(values, not args.no_bf16)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(args.repeats + 2):
        for name, (prepare, run) in calls.items():
            prepare()
            gather(None)
            begun = time.perf_counter()
            run()
            if repeat > 1:
                taken[name].append(time.perf_counter() - begun)
    slowest = {
        name: [max(times) for times in zip(*gather(of_one), strict=True)] for name, of_one in taken.items()
    }
    if hvd.rank() == 0:
        controller = "MPI" if hvd.mpi_enabled() else "Gloo"
        load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
        print(
            f"{args.framework} over {controller}, {hvd.size()} workers, {args.numbers:,} numbers, load {load}"
        )
        for name, times in slowest.items():
            ratio = statistics.median(a / b for a, b in zip(times, slowest["float32 sum"], strict=True))
            print(f"{name:<20} {1e3 * statistics.median(times):7.1f} ms {ratio:6.2f} of fp32", flush=True)


if __name__ == "__main__":
    main()
