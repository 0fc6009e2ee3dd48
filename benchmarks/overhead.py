"""Step time and memory of hvdtrain against a hand-written loop, side by side in one run.

    python benchmarks/overhead.py                      # one worker, both frameworks
    python benchmarks/overhead.py --workers 2          # the usual Horovod example code beside it
    OVERHEAD_FUSED=1 python benchmarks/overhead.py     # by hand with PyTorch's fused optimizer, as hvdtrain
    python benchmarks/overhead.py --frameworks torch --models resnet50 gpt --device gpu --precision bf16

Step by step in turn: the hand-written step runs inside hvdtrain's loop, where it reports a step,
so both see the same machine. hvdtrain runs whole: reading ahead, metrics, reports, checks.
Prints, per framework and model, the medians in milliseconds and their ratio. Peak memory is that
of processes of their own that run one loop each: of the process, or with --device gpu of tensors on the
GPU. On a GPU each step of either loop is waited for. At the end, the seconds that --help takes.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

STEPS, BATCH, MOMENTUM, DECAY, RATE = int(os.environ.get("OVERHEAD_STEPS", "400")), 32, 0.9, 1e-4, 0.01
MODELS = ("convnet", "mlp")
LARGE = ("resnet50", "gpt")  # of PyTorch alone, for a GPU
FUSED = os.environ.get("OVERHEAD_FUSED") == "1"
DEVICE, PRECISION, COMPILE = (
    os.environ.get(f"OVERHEAD_{name}") for name in ("DEVICE", "PRECISION", "COMPILE")
)
WARM = 40


class Bench:
    """Random images and a model of some size; the same for both loops."""

    loss = "cross_entropy"

    def __init__(self, model: str) -> None:
        self.model = model

    def arrays(self):
        random = np.random.RandomState(0)
        if self.model == "resnet50":
            return random.rand(512, 224, 224, 3).astype(np.float32), random.randint(0, 1000, 512)
        if self.model == "gpt":
            tokens = random.randint(0, 256, (512, 257))
            return tokens[:, :-1].copy(), tokens[:, 1:].copy()
        return random.rand(2048, 8, 8, 1).astype(np.float32), random.randint(0, 10, 2048)

    def train_data(self):
        return self.arrays()

    def eval_data(self):
        return None

    def torch_model(self):
        import torch
        from torch import nn

        from hvdtrain.models import convnet, gpt, resnet

        torch.manual_seed(0)
        if self.model == "convnet":
            return convnet.torch_model((8, 8, 1), 10)
        if self.model == "resnet50":
            return resnet.torch_model((224, 224, 3), 1000, depth=50, stem="imagenet")
        if self.model == "gpt":
            return gpt.torch_model(256, context=256, layers=8, heads=8, channels=512)
        layers = [nn.Flatten(), nn.Linear(64, 1400), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Linear(1400, 1400), nn.ReLU()]
        torch.manual_seed(0)
        return nn.Sequential(*layers, nn.Linear(1400, 10))

    def tf_model(self):
        import keras

        from hvdtrain.models import convnet

        if self.model == "convnet":
            return convnet.tf_model((8, 8, 1), 10)
        layers = keras.layers
        hidden = [layers.Dense(1400, activation="relu") for _ in range(4)]
        return keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), *hidden, layers.Dense(10)])


def torch_by_hand(model_name, distributed):
    """Return a step function: the loop of PyTorch's and Horovod's examples."""
    import torch
    from torch.nn import functional as F

    device = torch.device("cuda" if DEVICE == "gpu" else "cpu")
    model = Bench(model_name).torch_model().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY, fused=FUSED or None
    )
    computed = torch.compile(model) if COMPILE else model
    x, y = (torch.from_numpy(a) for a in Bench(model_name).arrays())
    if DEVICE == "gpu":
        x, y = x.pin_memory(), y.pin_memory()
    rank, size = 0, 1
    if distributed:
        import horovod.torch as hvd

        rank, size = hvd.rank(), hvd.size()
        named = [(f"hand.{name}", p) for name, p in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    order = torch.from_numpy(np.random.RandomState(1).permutation(len(x)))[rank::size]

    def step(i):
        start = i * BATCH % (len(order) - BATCH)
        chosen = order[start : start + BATCH]
        images, labels = (array[chosen].to(device, non_blocking=True) for array in (x, y))
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=PRECISION == "bf16"):
            outputs = computed(images)
        loss = F.cross_entropy(outputs.float().flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()

    return step


def tf_by_hand(model_name, distributed):
    """Return a step function: the loop of TensorFlow's guide, and of Horovod's examples."""
    import keras
    import tensorflow as tf

    model = Bench(model_name).tf_model()
    optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM, weight_decay=DECAY)
    optimizer.build(model.trainable_variables)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = Bench(model_name).arrays()
    rank, size, hvd = 0, 1, None
    if distributed:
        import horovod.tensorflow as hvd

        rank, size = hvd.rank(), hvd.size()
        hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)
    order = np.random.RandomState(1).permutation(len(x))[rank::size]

    @tf.function
    def update(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(images, training=True))
        if hvd is not None:
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def step(i):
        start = i * BATCH % (len(order) - BATCH)
        chosen = order[start : start + BATCH]
        update(tf.constant(x[chosen]), tf.constant(y[chosen]))

    return step


BY_HAND = {"torch": torch_by_hand, "tf": tf_by_hand}


def run_hvdtrain(framework, model, on_step):
    """Run hvdtrain's job; ``on_step()`` is called at each step that its loop reports."""
    from hvdtrain import train

    class StepTimer:
        every_rank = True

        def on_step(self, step, metrics):
            on_step()

    train(
        f"{__file__}:Bench", framework=framework, steps=STEPS, batch_size=BATCH, learning_rate=RATE,
        momentum=MOMENTUM, weight_decay=DECAY, lr_scaling="none", task_options={"model": model},
        eval_every=None, threads=1, run_dir=os.environ["OVERHEAD_RUN_DIR"], callbacks=[StepTimer()],
        device=DEVICE or "cpu", precision=PRECISION or "fp32", compile=bool(COMPILE),
    )  # fmt: skip


def side_by_side(framework, model, distributed):
    """Return the step times in milliseconds of both loops, run in turn."""
    mine, hand, state = [], [], {"by_hand": None, "from": None, "count": 0}

    def on_step():
        wait_for_device()
        now = time.perf_counter()
        if state["from"] is not None:
            mine.append((now - state["from"]) * 1e3)
        if state["by_hand"] is None:
            state["by_hand"] = BY_HAND[framework](model, distributed)
        start = time.perf_counter()
        state["by_hand"](state["count"])
        wait_for_device()
        state["count"] += 1
        state["from"] = time.perf_counter()
        hand.append((state["from"] - start) * 1e3)

    run_hvdtrain(framework, model, on_step)
    return mine[WARM:], hand[WARM:]


def wait_for_device():
    if DEVICE == "gpu":
        import torch

        torch.cuda.synchronize()


def peak_mib():
    if DEVICE == "gpu":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def worker(kind, framework, model, distributed):
    """What one measured process does; rank 0 prints a line of JSON."""
    if kind == "times":
        mine, hand = side_by_side(framework, model, distributed)
        result = {
            "hvdtrain": statistics.median(mine), "hand": statistics.median(hand),
            "hvdtrain mean": statistics.mean(mine), "hand mean": statistics.mean(hand),
        }  # fmt: skip
    elif kind == "memory of hvdtrain":
        run_hvdtrain(framework, model, lambda: None)
        result = {"MiB": peak_mib()}
    else:
        if distributed:
            __import__(f"horovod.{'torch' if framework == 'torch' else 'tensorflow'}", fromlist=["x"]).init()
        step = BY_HAND[framework](model, distributed)
        for i in range(STEPS):
            step(i)
        result = {"MiB": peak_mib()}
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("HOROVOD_RANK") or "0"
    if rank == "0":
        print("RESULT " + json.dumps(result), flush=True)


def measure(kind, framework, model, workers):
    command = [sys.executable, __file__, "--worker", kind, "--frameworks", framework, "--models", model]
    if workers > 1:
        command = ["horovodrun", "-np", str(workers), *command, "--workers", str(workers)]
    folder = tempfile.mkdtemp()
    environ = {
        **os.environ, "OVERHEAD_RUN_DIR": f"{folder}/run",
        "OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "HOROVOD_FUSION_THRESHOLD": str(128 << 20),  # as by default, for the loop by hand in the same process
    }  # fmt: skip
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1200, check=False)
    shutil.rmtree(folder)
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    if not lines:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return json.loads(lines[0])


def seconds_of(command):
    """Return the median wall time of a command, of seven runs."""
    times = []
    for _ in range(7):
        start = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--frameworks", nargs="+", default=["torch", "tf"])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS + LARGE)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.worker:  # for the processes that are measured
        chosen = {"DEVICE": args.device, "PRECISION": args.precision, "COMPILE": "1" if args.compile else ""}
        os.environ.update({f"OVERHEAD_{name}": value for name, value in chosen.items()})
    if args.worker:
        return worker(args.worker, args.frameworks[0], args.models[0], args.workers > 1)
    print(f"{args.workers} worker(s), batch {BATCH} each, {STEPS} steps, {args.repeats} runs; 1 thread each")
    for framework in args.frameworks:
        for model in args.models:
            runs = [measure("times", framework, model, args.workers) for _ in range(args.repeats)]
            ratios = sorted(r["hvdtrain"] / r["hand"] for r in runs)
            means = sorted(r["hvdtrain mean"] / r["hand mean"] for r in runs)
            middle = sorted(runs, key=lambda r: r["hvdtrain"] / r["hand"])[len(runs) // 2]
            memory = [
                measure(f"memory of {who}", framework, model, args.workers)["MiB"]
                for who in ("hvdtrain", "hand")
            ]
            print(
                f"{framework:5} {model:8} hvdtrain {middle['hvdtrain']:7.3f} ms  "
                f"by hand {middle['hand']:7.3f} ms  "
                f"ratio of medians {ratios[len(ratios) // 2]:.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})  "
                f"of means {means[len(means) // 2]:.3f}  "
                f"memory {memory[0]:.0f} / {memory[1]:.0f} MiB = {memory[0] / memory[1]:.2f}",
                flush=True,
            )
    shown = seconds_of([sys.executable, "-m", "hvdtrain", "--help"])
    bare = seconds_of([sys.executable, "-c", "pass"])
    print(f"python -m hvdtrain --help: {shown:.2f} s; Python alone: {bare:.2f} s")
    return None


if __name__ == "__main__":
    main()
