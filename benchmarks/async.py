"""Quality against bytes: synchronous training, stale gradients, and local steps.

    python benchmarks/async.py --json digits.json            # a perceptron on scikit-learn's digits
    python benchmarks/async.py TEXT --json gpt.json          # a small character GPT on a text
    python benchmarks/async.py --draw digits.json docs/async.svg

All workers are simulated in one process, by the formulas that jobs have (tests/contract/suite_local_steps.py
shows that those of local steps are the same): the figures are about the loss and about bytes, not about time.
Every method sees the same number of samples. ``stale S`` is what asynchronous workers with a parameter server
do, in its regular form: each update uses one worker's gradient at the parameters of S updates before.

Bytes are those that one worker sends: a ring sends 2 (W - 1) / W times what is averaged, gradients or, with
local steps, parameters and both moments of AdamW; with a server, a gradient for each update of a worker.
"""

import argparse
import copy
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from hvdtrain.models import gpt

CONTEXT, LAYERS, HEADS, CHANNELS = 32, 2, 4, 64
BATCH, WARMUP = 16, 20
EVERY = (4, 10, 50)
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
Batch = tuple[torch.Tensor, torch.Tensor]
Data = Any  # DigitImages or Text


class DigitImages:
    """Images of digits and a perceptron: every fifth image is held out.

    Args:
        seed: of the order.
    """

    def __init__(self, seed: int) -> None:
        images = load_digits()
        inputs = torch.from_numpy(images.data.astype(np.float32) / 16)
        targets = torch.from_numpy(images.target)
        held = torch.arange(len(targets)) % 5 == 0
        self.held_out = inputs[held], targets[held]
        self._inputs, self._targets = inputs[~held], targets[~held]
        self._random = np.random.RandomState(seed)

    def batch(self) -> Batch:
        """Return the next samples."""
        places = torch.from_numpy(self._random.randint(0, len(self._targets), BATCH))
        return self._inputs[places], self._targets[places]

    @staticmethod
    def model() -> torch.nn.Module:
        """Return the model."""
        nn = torch.nn
        return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))


class Text:
    """Windows of a text and a character GPT: the last tenth of the text is held out.

    Args:
        path: the file.
        seed: of the order.
    """

    def __init__(self, path: Path, seed: int) -> None:
        text = path.read_text(encoding="utf-8")
        characters = sorted(set(text))
        code = {character: number for number, character in enumerate(characters)}
        codes = torch.tensor([code[character] for character in text])
        self.vocabulary = len(characters)
        self._train, held = codes[: len(codes) * 9 // 10], codes[len(codes) * 9 // 10 :]
        places = torch.arange(0, min(len(held), 20_000) - CONTEXT - 1, CONTEXT)
        self.held_out = self._windows(held, places)
        self._random = np.random.RandomState(seed)

    def batch(self) -> Batch:
        """Return the next samples."""
        places = self._random.randint(0, len(self._train) - CONTEXT - 1, BATCH)
        return self._windows(self._train, torch.from_numpy(places))

    def model(self) -> torch.nn.Module:
        """Return the model."""
        return gpt.torch_model(self.vocabulary, CONTEXT, LAYERS, HEADS, CHANNELS)

    @staticmethod
    def _windows(codes: torch.Tensor, places: torch.Tensor) -> Batch:
        rows = places[:, None] + torch.arange(CONTEXT + 1)[None]
        windows = codes[rows]
        return windows[:, :-1], windows[:, 1:]


class Worker:
    """A model with its optimizer."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, weight_decay=0.0)

    def gradient(self, batch: Batch) -> list[torch.Tensor]:
        """Return the gradient of the mean loss over a batch."""
        logits = self.model(batch[0])
        loss = F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())
        return list(torch.autograd.grad(loss, self.parameters))

    def step(self, gradient: Sequence[torch.Tensor], rate: float) -> None:
        """Take a step."""
        for parameter, part in zip(self.parameters, gradient, strict=True):
            parameter.grad = part
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()

    def slots(self) -> list[torch.Tensor]:
        """Return the moments."""
        states = [self.optimizer.state[parameter] for parameter in self.parameters]
        return [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]

    @torch.no_grad()
    def loss(self, batch: Batch) -> float:
        """Return the mean loss."""
        logits = self.model(batch[0])
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten()).item()


def schedule(peak: float, steps: int) -> Iterator[float]:
    """Yield a rate for each step: a warm-up, then half a cosine."""
    for step in range(steps):
        part = step / steps
        yield peak * min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * part))


def synchronous(data: Data, one: Worker, workers: int, peak: float, steps: int) -> Worker:
    """Train with the mean gradient of all workers."""
    for rate in schedule(peak, steps):
        gradients = [one.gradient(data.batch()) for _ in range(workers)]
        one.step([sum(parts) / workers for parts in zip(*gradients, strict=True)], rate)
    return one


def stale(  # noqa: PLR0917 - as the others, and what differs
    data: Data, one: Worker, workers: int, peak: float, steps: int, delay: int
) -> Worker:
    """Train with each worker's gradient by itself, at the parameters of some updates before."""
    old = deque([copy.deepcopy(one.model.state_dict())], maxlen=delay + 1)
    reader = Worker(copy.deepcopy(one.model))
    for rate in (rate for rate in schedule(peak, steps) for _ in range(workers)):
        reader.model.load_state_dict(old[0])
        one.step(reader.gradient(data.batch()), rate)
        old.append(copy.deepcopy(one.model.state_dict()))
    return one


@torch.no_grad()
def mean_into(tensors: Sequence[Sequence[torch.Tensor]]) -> None:
    """Make lists of tensors equal to their mean."""
    for parts in zip(*tensors, strict=True):
        mean = torch.stack(list(parts)).mean(0)
        for part in parts:
            part.copy_(mean)


def local_steps(  # noqa: PLR0917 - as the others, and what differs
    data: Data,
    one: Worker,
    workers: int,
    peak: float,
    steps: int,
    every: int,
    outer: bool,
    own_slots: bool = False,
) -> Worker:
    """Train alone, and average or take an outer step after every so many steps."""
    all_of_them = [one, *(Worker(copy.deepcopy(one.model)) for _ in range(workers - 1))]
    start = [p.detach().clone() for p in one.parameters]
    momenta = [torch.zeros_like(p) for p in start]
    for step, rate in enumerate(schedule(peak, steps), 1):
        for worker in all_of_them:
            worker.step(worker.gradient(data.batch()), rate)
        if step % every and step != steps:
            continue
        mean_into([worker.parameters for worker in all_of_them])
        if not own_slots:
            mean_into([worker.slots() for worker in all_of_them])
        if outer:
            _outer_step(all_of_them, start, momenta)
    return one


@torch.no_grad()
def _outer_step(
    workers: Sequence[Worker], start: Sequence[torch.Tensor], momenta: Sequence[torch.Tensor]
) -> None:
    for place, (begun, momentum) in enumerate(zip(start, momenta, strict=True)):
        gradient = begun - workers[0].parameters[place]
        momentum.mul_(OUTER_MOMENTUM).add_(gradient)
        begun.sub_(OUTER_RATE * (gradient + OUTER_MOMENTUM * momentum))
        for worker in workers:
            worker.parameters[place].copy_(begun)


def ways(numbers: int) -> Iterator[tuple[str, int, Callable[..., Worker], dict[str, Any], float]]:
    """Yield name, workers, function, its arguments and the bytes of a step for a number of parameters."""
    size = 4 * numbers
    for workers in (2, 4):
        ring = 2 * (workers - 1) / workers * size
        yield "synchronous", workers, synchronous, {}, ring
        for delay in (workers - 1, 8 * workers):
            yield f"stale by {delay}", workers, stale, {"delay": delay}, size
        for every in EVERY:
            for outer in (False, True):
                name = f"local steps, N = {every}, {'nesterov' if outer else 'average'}"
                options = {"every": every, "outer": outer}
                yield name, workers, local_steps, options, 3 * ring / every
            options = {"every": every, "outer": False, "own_slots": True}
            yield (
                f"local steps, N = {every}, moments not averaged",
                workers,
                local_steps,
                options,
                ring / every,
            )


def measured(
    load: Callable[[int], Data], steps: int, rates: Sequence[float], seeds: int
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each way: the best of the rates by its mean over the seeds."""
    torch.manual_seed(0)
    first = load(0).model()
    numbers = sum(p.numel() for p in first.parameters())
    for name, workers, train, options, step_bytes in ways(numbers):
        losses: dict[float, list[float]] = {rate: [] for rate in rates}
        for rate, seed in itertools.product(rates, range(seeds)):
            data, one = load(seed), Worker(copy.deepcopy(first))
            losses[rate].append(train(data, one, workers, rate, steps, **options).loss(data.held_out))
        means = {rate: np.nan_to_num(np.mean(found), nan=np.inf) for rate, found in losses.items()}
        best = min(means, key=means.__getitem__)
        row = {
            "way": name, "workers": workers, "steps": steps, "rate": best, "losses": losses[best],
            "parameters": numbers, "megabytes": step_bytes * steps / 1e6,
        }  # fmt: skip
        spread = f"{min(losses[best]):.3f}-{max(losses[best]):.3f}"
        shown = f"{np.mean(losses[best]):.3f} ({spread}) {row['megabytes']:8.2f} MB  rate {best:g}"
        print(f"{workers} workers  {name:48} {shown}", flush=True)
        yield row


COLORS = {"synchronous": "#222", "stale": "#d62728", "average": "#1f77b4", "nesterov": "#2ca02c"}


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """Return an SVG: loss over the megabytes that a worker sends, a panel for each number of workers."""
    width, height, left, top = 360, 260, 50, 30
    rows = [row for row in rows if "not averaged" not in row["way"]]
    losses = [float(np.mean(row["losses"])) for row in rows]
    low, high = math.floor(min(losses) * 10) / 10, math.ceil(max(losses) * 10) / 10
    ends = [math.floor(math.log10(min(r["megabytes"] for r in rows))), 0]
    ends[1] = math.ceil(math.log10(max(r["megabytes"] for r in rows)))
    parts = []
    for panel, workers in enumerate((2, 4)):
        x0 = left + panel * (width + 60)
        parts.append(
            f'<rect x="{x0}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>'
        )
        parts.append(f'<text x="{x0 + width / 2}" y="20" text-anchor="middle">{workers} workers</text>')
        for power in range(ends[0], ends[1] + 1):
            x = x0 + (power - ends[0]) / (ends[1] - ends[0]) * width
            parts.append(f'<text x="{x}" y="{top + height + 16}" text-anchor="middle">{10**power:g}</text>')
        for value in (low, (low + high) / 2, high):
            y = top + (high - value) / (high - low) * height
            parts.append(f'<text x="{x0 - 6}" y="{y + 4}" text-anchor="end">{value:.2f}</text>')
        for row, loss in zip(rows, losses, strict=True):
            if row["workers"] != workers:
                continue
            x = x0 + (math.log10(row["megabytes"]) - ends[0]) / (ends[1] - ends[0]) * width
            y = top + (high - loss) / (high - low) * height
            color = next(color for word, color in COLORS.items() if word in row["way"])
            label = row["way"].removeprefix("local steps, ").partition(", ")[0].removeprefix("stale by ")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>')
            parts.append(f'<text x="{x + 6:.1f}" y="{y + 4:.1f}" fill="{color}">{label}</text>')
        foot = "megabytes that one worker sends"
        parts.append(f'<text x="{x0 + width / 2}" y="{top + height + 34}" text-anchor="middle">{foot}</text>')
    for place, (word, color) in enumerate(COLORS.items()):
        parts.append(f'<text x="{left + place * 150}" y="{top + height + 56}" fill="{color}">{word}</text>')
    size = f'width="{2 * width + 140}" height="{height + 100}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([start, background, *parts, "</svg>", ""])


def main() -> None:
    """Measure, or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("text", nargs="?", type=Path, help="a text file; digits if not given")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 4e-3])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("JSON", "SVG"))
    given = parser.parse_args()
    if given.draw:
        given.draw[1].write_text(draw(json.loads(given.draw[0].read_text())))
        return
    torch.set_num_threads(1)
    load = DigitImages if given.text is None else partial(Text, given.text)
    rows = list(measured(load, given.steps, given.rates, given.seeds))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
