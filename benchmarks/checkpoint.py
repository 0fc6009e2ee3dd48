"""What saving costs: the time by which steps grow, and the speed of writing.

    python benchmarks/checkpoint.py                  # 100 M parameters, adamw: 1.2 GB of state
    python benchmarks/checkpoint.py --parameters 25  # millions

hvdtrain trains with one worker and saves every few steps, in the background. Timed, in the same run:

- a plain step, while nothing is being written;
- the pause: how long the step that saves waits. Beside it, a copy of arrays of the same sizes;
- steps while a checkpoint is being written;
- writing: converting, writing, syncing and hashing. Beside it, safetensors' own ``save_file`` of the
  same arrays to the same disk, alone and with a sync.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from hvdtrain.checkpoints import storage

WIDTH, BATCH, SAVE_EVERY, SAVES = 4096, 16, 14, 4


class Wide:
    """Random inputs and targets, and as many square layers as make up the parameters."""

    loss = "mse"

    def __init__(self, layers):
        self.layers = layers

    def train_data(self):
        random = np.random.RandomState(0)
        return random.rand(256, WIDTH).astype(np.float32), random.rand(256, WIDTH).astype(np.float32)

    def eval_data(self):
        return None

    def torch_model(self):
        from torch import nn

        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(self.layers)))

    def tf_model(self):
        import keras

        layers = [keras.layers.Dense(WIDTH) for _ in range(self.layers)]
        return keras.Sequential([keras.Input((WIDTH,)), *layers])


class Times:
    """When steps begin, and how long saving takes, in the thread that trains and in the other."""

    def __init__(self):
        self.steps, self.saves, self.writes = [], [], []

    def watch(self, framework):
        """Put a clock around a step, a save and a write."""
        from importlib import import_module

        from hvdtrain.checkpoints import saver as saving
        from hvdtrain.host.frameworks import FRAMEWORKS

        module = import_module(FRAMEWORKS[framework].module)
        backend = {"torch": "TorchBackend", "tf": "TensorFlowBackend"}[framework]
        self._wrap(getattr(module, backend), "train_step", self.steps)
        self._wrap(saving.BackgroundSaver, "save", self.saves)
        self._wrap(saving.BackgroundSaver, "_write", self.writes)

    @staticmethod
    def _wrap(owner, name, times):
        function = getattr(owner, name)

        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                times.append((start, time.perf_counter()))

        setattr(owner, name, timed)


def measure(framework, layers, folder):
    """Train with saves; give seconds."""
    import hvdtrain

    times = Times()
    times.watch(framework)
    hvdtrain.train(
        Wide,
        framework=framework,
        task_options={"layers": layers},
        optimizer="adamw",
        learning_rate=1e-4,
        batch_size=BATCH,
        steps=SAVE_EVERY * SAVES,
        save_every=SAVE_EVERY,
        keep_last=1,
        threads=1,
        device="cpu",
        log_every=1000,
        run_dir=str(folder / "run"),
    )
    plain, writing = [], []
    ends = [end for _, end in times.writes]
    for (start, _), (after, _) in zip(times.steps[2:], times.steps[3:], strict=False):
        if any(s[0] >= start and s[0] < after for s in times.saves):
            continue  # its pause is counted by itself
        busy = any(s[1] < after and e > start for s, e in zip(times.saves, ends, strict=True))
        (writing if busy else plain).append(after - start)
    newest = sorted((folder / "run" / "checkpoints").glob("step-*"))[-1]
    state = storage.verify(newest).read()
    pauses = [end - start for start, end in times.saves]
    return {
        "gigabytes": sum(array.nbytes for array in state.values()) / 1e9,
        "plain_step": statistics.median(plain),
        "writing_step": statistics.median(writing) if writing else None,
        "steps_while_writing": len(writing) / SAVES,
        "first_pause": pauses[0],
        "pause": statistics.median(pauses[1:]),
        "write": statistics.median(end - start for start, end in times.writes[1:]),
        **beside(state, folder),
    }


def beside(state, folder):
    """Time a copy of the arrays and safetensors' own writing of them."""
    from safetensors.numpy import save_file

    def seconds(work, times=3):
        taken = []
        for _ in range(times):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    def write_synced():
        save_file(state, folder / "beside.safetensors")
        with (folder / "beside.safetensors").open("rb") as file:
            os.fsync(file.fileno())

    again = {name: np.empty_like(array) for name, array in state.items()}
    result = {
        "copy_into_new_memory": seconds(lambda: {name: array.copy() for name, array in state.items()}),
        "copy_into_used_memory": seconds(lambda: [np.copyto(again[name], a) for name, a in state.items()]),
        "save_file": seconds(lambda: save_file(state, folder / "beside.safetensors")),
        "save_file_synced": seconds(write_synced),
    }
    (folder / "beside.safetensors").unlink()
    return result


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=100.0, help="millions")
    parser.add_argument("--frameworks", nargs="+", default=["torch", "tf"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    layers = max(1, round(options.parameters * 1e6 / (WIDTH * (WIDTH + 1))))
    if options.one:
        folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir="."))
        try:
            print("RESULT " + json.dumps(measure(options.one, layers, folder)))
        finally:
            shutil.rmtree(folder)
        return
    for framework in options.frameworks:
        command = [sys.executable, __file__, "--parameters", str(options.parameters), "--one", framework]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        line = next(line for line in output.splitlines() if line.startswith("RESULT "))
        show(framework, json.loads(line.removeprefix("RESULT ")))


def show(framework, t):
    """Print one framework's figures."""
    print(f"{framework}: {t['gigabytes']:.2f} GB of state")
    print(f"  plain step {t['plain_step']:.3f} s")
    print(
        f"  pause of a step that saves {t['pause']:.3f} s (the first {t['first_pause']:.3f}); "
        f"a copy of the state takes {t['copy_into_used_memory']:.3f} s, into new memory "
        f"{t['copy_into_new_memory']:.3f} s: ratio {t['pause'] / t['copy_into_used_memory']:.2f}"
    )
    if t["writing_step"]:
        print(
            f"  step while writing {t['writing_step']:.3f} s: ratio "
            f"{t['writing_step'] / t['plain_step']:.3f} ({t['steps_while_writing']:.0f} steps a checkpoint)"
        )
    print(
        f"  writing {t['write']:.2f} s ({t['gigabytes'] / t['write']:.2f} GB/s); save_file "
        f"{t['save_file']:.2f} s, synced {t['save_file_synced']:.2f} s: "
        f"ratio {t['write'] / t['save_file']:.2f}, to synced {t['write'] / t['save_file_synced']:.2f}"
    )


if __name__ == "__main__":
    main()
