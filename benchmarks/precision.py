"""Step time by precision and compiler, and memory of recomputed blocks, side by side in one run.

    python benchmarks/precision.py                               # both frameworks, all models
    python benchmarks/precision.py --frameworks tf --models gpt --steps 100
    python benchmarks/precision.py --memory                      # recomputed blocks: peak memory

One process per framework and model holds the model once per way of computing and takes a step of each
in turn, so all see the same machine; one thread. Prints medians in milliseconds, and their ratios to
fp32, least and largest of the parts that the run is cut into in brackets. Compiling is not counted: its
seconds stand beside. Memory is that of processes of their own: the peak beyond what was there before
the first step of that size.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np

WAYS = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "fp32+compile": {"compile": True},
    "bf16+compile": {"precision": "bf16", "compile": True},
    "recompute": {"checkpoint_activations": True},
}
# batch, inputs of one sample, tokens or classes
SHAPES = {
    "convnet": (32, (8, 8, 1), 10),
    "resnet18": (16, (32, 32, 3), 10),
    "gpt": (12, (64,), 65),
    "gpt-wide": (8, (128,), 65),
    "gpt-long": (8, (512,), 65),
}
MODELS = ("convnet", "resnet18", "gpt", "gpt-wide")
SIZES = {"gpt": (4, 4, 128), "gpt-wide": (4, 8, 512), "gpt-long": (8, 4, 128)}  # layers, heads, channels
WARM, PARTS = 5, 5


class Bench:
    """One model on random data."""

    loss = "cross_entropy"

    def __init__(self, model):
        self.model = model

    def torch_model(self):
        return self.build("torch_model")

    def tf_model(self):
        return self.build("tf_model")

    def build(self, function):
        _, shape, classes = SHAPES[self.model]
        if self.model == "convnet":
            from hvdtrain.models import convnet

            return getattr(convnet, function)(shape, classes)
        if self.model == "resnet18":
            from hvdtrain.models.choose import image_model

            return image_model(function.partition("_")[0], "resnet18", shape, classes)
        from hvdtrain.models import gpt

        return getattr(gpt, function)(classes, *shape, *SIZES[self.model])

    def batch(self):
        from hvdtrain.data.feed import HostBatch

        size, shape, classes = SHAPES[self.model]
        random = np.random.RandomState(0)
        is_text = len(shape) == 1
        inputs = random.randint(0, classes, (1, size, *shape)) if is_text else random.rand(1, size, *shape)
        targets = random.randint(0, classes, inputs.shape if is_text else (1, size))
        arrays = {"inputs": inputs if is_text else inputs.astype(np.float32), "targets": targets}
        return HostBatch(0, arrays, np.ones((1, size), np.float32), float(size), np.arange(size)[None])


class Stepper:
    """A model in one way of computing.

    ``started_seconds`` is what building and its first step took.
    """

    def __init__(self, framework, model, way):
        from hvdtrain.backends import load_backend
        from hvdtrain.config import Config

        config = Config(framework=framework, device="cpu", threads=1, learning_rate=1e-4, **WAYS[way])
        self.backend = load_backend(config)
        begun = time.perf_counter()
        self.backend.build(Bench(model), config)
        self.on_device = next(iter(self.backend.to_device([Bench(model).batch()])))
        self.step()
        self.started_seconds = time.perf_counter() - begun

    def step(self):
        """Return the milliseconds of one step."""
        begun = time.perf_counter()
        self.backend.train_step(self.on_device, 1e-4).read()
        return (time.perf_counter() - begun) * 1e3


def times(framework, model, steps):
    """Return medians and ratios of every way that the model has."""
    from hvdtrain.errors import TaskError

    steppers = {}
    for way in WAYS:
        try:
            steppers[way] = Stepper(framework, model, way)
        except TaskError as error:
            if "without repeated blocks" not in str(error):
                raise
    found = {way: [] for way in steppers}
    for _ in range(WARM + steps):
        for way, stepper in steppers.items():
            found[way].append(stepper.step())
    found = {way: values[WARM:] for way, values in found.items()}
    size = -(-steps // PARTS)
    parts = [
        {way: statistics.median(values[i : i + size]) for way, values in found.items()}
        for i in range(0, steps, size)
    ]
    result = {}
    for way, values in found.items():
        ratios = sorted(part[way] / part["fp32"] for part in parts)
        middle = statistics.median(values)
        result[way] = {
            "ms": middle, "ratio": middle / statistics.median(found["fp32"]),
            "least": ratios[0], "largest": ratios[-1], "first": steppers[way].started_seconds,
        }  # fmt: skip
    return result


def peak_mib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def memory(framework, model, way):
    """Return the peak memory of training beyond that of a small model's training."""
    Stepper(framework, "gpt", way)
    before = peak_mib()
    stepper = Stepper(framework, model, way)
    for _ in range(3):
        stepper.step()
    return {"MiB": peak_mib() - before}


def measure(*arguments):
    """Run this file in a process of its own; give its result."""
    environ = {
        **os.environ, "OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }  # fmt: skip
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=3600, check=False)
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    if not lines:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return json.loads(lines[0])


def show_times(framework, model, steps):
    found = measure("--worker", "times", "--frameworks", framework, "--models", model, "--steps", steps)
    for way, one in found.items():
        print(
            f"{framework:5} {model:9} {way:13} {one['ms']:8.2f} ms  ratio {one['ratio']:.2f} "
            f"({one['least']:.2f}-{one['largest']:.2f})  first step after {one['first']:.1f} s",
            flush=True,
        )


def show_memory(framework):
    ways = ("fp32", "recompute")
    arguments = ("--frameworks", framework, "--models", "gpt-long")
    plain, recomputed = (measure("--worker", way, *arguments)["MiB"] for way in ways)
    print(f"{framework:5} gpt-long peak {plain:.0f} MiB, recomputed {recomputed:.0f} MiB = ", end="")
    print(f"{recomputed / plain:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frameworks", nargs="+", default=["torch", "tf"])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=SHAPES)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        framework, model = args.frameworks[0], args.models[0]
        found = (
            times(framework, model, args.steps)
            if args.worker == "times"
            else memory(framework, model, args.worker)
        )
        return print("RESULT " + json.dumps(found), flush=True)
    for framework in args.frameworks:
        if args.memory:
            show_memory(framework)
            continue
        for model in args.models:
            show_times(framework, model, args.steps)
    return None


if __name__ == "__main__":
    main()
