"""Quality against bytes: synchronous training, stale gradients, and local steps.

    python benchmarks/async.py --json digits.json           # a perceptron on scikit-learn's digits
    python benchmarks/async.py TEXT --json gpt.json         # a small character GPT on a text
    python benchmarks/async.py --draw docs/async.json docs/async.svg

All workers are simulated in one process, by the formulas that jobs have (tests/contract/suite_local_steps.py
shows that those of local steps are the same): the figures are about the loss and about bytes, not about time.
Every method sees the same number of samples. ``stale S`` is what asynchronous workers with a parameter server
do, in its regular form: each update uses one worker's gradient at the parameters of S updates before.

Bytes are those that one worker sends: a ring sends 2 (W - 1) / W times what is averaged, gradients or, with
local steps, parameters and both moments of AdamW; with a server, a gradient for each update of a worker.
"""

import argparse
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

CONTEXT, LAYERS, HEADS, CHANNELS = 32, 2, 4, 64  # of the GPT
HIDDEN = 64  # of the perceptron
BATCH, WARMUP = 16, 20
EVERY = (4, 10, 50)
BETAS, EPSILON = (0.9, 0.999), 1e-8
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
Vector = NDArray[np.float32]
Problem = Any  # DigitImages or Text


class DigitImages:
    """Images of digits and a perceptron: every fifth image is held out.

    Args:
        seed: of the order.

    Attributes:
        first: the initial parameters, as one vector.
    """

    def __init__(self, seed: int) -> None:
        images = load_digits()
        inputs = images.data.astype(np.float32) / 16
        held = np.arange(len(inputs)) % 5 == 0
        self._held_out = inputs[held], images.target[held]
        self._inputs, self._targets = inputs[~held], images.target[~held]
        self._random = np.random.RandomState(seed)
        first = np.random.RandomState(0)
        self._shapes = ((64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,))
        parts = [first.randn(*shape) / 8 if len(shape) > 1 else np.zeros(shape) for shape in self._shapes]
        self.first = np.concatenate([part.ravel() for part in parts]).astype(np.float32)

    def gradient(self, parameters: Vector) -> Vector:
        """Return the gradient of the mean loss of the next samples."""
        places = self._random.randint(0, len(self._targets), BATCH)
        x, targets = self._inputs[places], self._targets[places]
        a, _, b, _ = weights = self._matrices(parameters)
        hidden, errors = self._forward(weights, x)
        errors[np.arange(BATCH), targets] -= 1
        errors /= BATCH
        inner = errors @ b.T * (1 - hidden**2)
        parts = (x.T @ inner, inner.sum(0), hidden.T @ errors, errors.sum(0))
        assert a.shape == parts[0].shape
        return np.concatenate([part.ravel() for part in parts])

    def loss(self, parameters: Vector) -> float:
        """Return the mean loss of the samples that are held out."""
        x, targets = self._held_out
        _, likelihood = self._forward(self._matrices(parameters), x)
        return float(-np.log(np.maximum(likelihood[np.arange(len(x)), targets], 1e-30)).mean())

    def _matrices(self, parameters: Vector) -> list[Any]:
        ends = np.cumsum([math.prod(shape) for shape in self._shapes])[:-1]
        parts = np.split(parameters, ends)
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    @staticmethod
    def _forward(weights: Sequence[Any], x: Any) -> tuple[Any, Any]:
        a, c, b, d = weights
        hidden = np.tanh(x @ a + c)
        logits = hidden @ b + d
        logits = np.exp(logits - logits.max(1, keepdims=True))
        return hidden, logits / logits.sum(1, keepdims=True)


class Text:
    """Windows of a text and a character GPT in PyTorch: the last tenth of the text is held out.

    Args:
        path: the file.
        seed: of the order.

    Attributes:
        first: the initial parameters, as one vector.
    """

    def __init__(self, path: Path, seed: int) -> None:
        import torch

        from hvdtrain.models import gpt

        torch.set_num_threads(1)
        torch.manual_seed(0)
        text = path.read_text(encoding="utf-8")
        code = {character: number for number, character in enumerate(sorted(set(text)))}
        codes = torch.tensor([code[character] for character in text])
        self._train, held = codes[: len(codes) * 9 // 10], codes[len(codes) * 9 // 10 :]
        self._held_out = self._windows(held, np.arange(0, min(len(held), 20_000) - CONTEXT - 1, CONTEXT))
        self._random = np.random.RandomState(seed)
        self._model = gpt.torch_model(len(code), CONTEXT, LAYERS, HEADS, CHANNELS)
        self._parameters = list(self._model.parameters())
        self.first = torch.nn.utils.parameters_to_vector(self._parameters).detach().numpy().copy()

    def gradient(self, parameters: Vector) -> Vector:
        """Return the gradient of the mean loss of the next samples."""
        import torch

        places = self._random.randint(0, len(self._train) - CONTEXT - 1, BATCH)
        loss = self._loss(parameters, self._windows(self._train, places))
        parts = torch.autograd.grad(loss, self._parameters)
        return np.asarray(torch.cat([part.flatten() for part in parts]).numpy())

    def loss(self, parameters: Vector) -> float:
        """Return the mean loss of the samples that are held out."""
        return float(self._loss(parameters, self._held_out).item())

    def _loss(self, parameters: Vector, windows: Any) -> Any:
        import torch

        torch.nn.utils.vector_to_parameters(torch.from_numpy(parameters.copy()), self._parameters)
        logits = self._model(windows[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    @staticmethod
    def _windows(codes: Any, places: Any) -> Any:
        return codes[places[:, None] + np.arange(CONTEXT + 1)[None]]


class Worker:
    """Parameters, and what AdamW keeps for them."""

    def __init__(self, parameters: Vector) -> None:
        self.parameters = parameters.copy()
        self.first, self.second = np.zeros_like(parameters), np.zeros_like(parameters)
        self._steps = 0

    def step(self, gradient: Vector, rate: float) -> None:
        """Take a step."""
        self._steps += 1
        self.first += (1 - BETAS[0]) * (gradient - self.first)
        self.second += (1 - BETAS[1]) * (gradient**2 - self.second)
        first = self.first / (1 - BETAS[0] ** self._steps)
        second = self.second / (1 - BETAS[1] ** self._steps)
        self.parameters -= rate * first / (np.sqrt(second) + EPSILON)


def schedule(peak: float, steps: int) -> Iterator[float]:
    """Yield a rate for each step: a warm-up, then half a cosine."""
    for step in range(steps):
        part = step / steps
        yield peak * min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * part))


def synchronous(problem: Problem, workers: int, peak: float, steps: int) -> Vector:
    """Train with the mean gradient of all workers."""
    one = Worker(problem.first)
    for rate in schedule(peak, steps):
        one.step(np.mean([problem.gradient(one.parameters) for _ in range(workers)], 0), rate)
    return one.parameters


def stale(problem: Problem, workers: int, peak: float, steps: int, *, delay: int) -> Vector:
    """Train with each worker's gradient by itself, at the parameters of some updates before."""
    one = Worker(problem.first)
    old = deque([one.parameters.copy()], maxlen=delay + 1)
    for rate in (rate for rate in schedule(peak, steps) for _ in range(workers)):
        one.step(problem.gradient(old[0]), rate)
        old.append(one.parameters.copy())
    return one.parameters


def local_steps(
    problem: Problem,
    workers: int,
    peak: float,
    steps: int,
    *,
    every: int,
    outer: bool,
    own_moments: bool = False,
) -> Vector:
    """Train alone, and average or take an outer step after every so many steps."""
    all_of_them = [Worker(problem.first) for _ in range(workers)]
    start, momentum = problem.first.copy(), np.zeros_like(problem.first)
    for step, rate in enumerate(schedule(peak, steps), 1):
        for worker in all_of_them:
            worker.step(problem.gradient(worker.parameters), rate)
        if step % every and step != steps:
            continue
        mean = np.mean([worker.parameters for worker in all_of_them], 0)
        if outer:
            gradient = start - mean
            momentum = OUTER_MOMENTUM * momentum + gradient
            mean = start - OUTER_RATE * (gradient + OUTER_MOMENTUM * momentum)
        start = mean
        moments = [np.mean([getattr(w, name) for w in all_of_them], 0) for name in ("first", "second")]
        for worker in all_of_them:
            worker.parameters = mean.copy()
            if not own_moments:
                worker.first, worker.second = moments[0].copy(), moments[1].copy()
    return start


def ways(numbers: int) -> Iterator[tuple[str, int, Callable[..., Vector], dict[str, Any], float]]:
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
            options = {"every": every, "outer": False, "own_moments": True}
            yield (
                f"local steps, N = {every}, moments not averaged",
                workers,
                local_steps,
                options,
                ring / every,
            )


def measured(
    load: Callable[[int], Problem], steps: int, rates: Sequence[float], seeds: int
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each way: the best of the rates by its mean over the seeds."""
    numbers = len(load(0).first)
    for name, workers, train, options, step_bytes in ways(numbers):
        losses: dict[float, list[float]] = {rate: [] for rate in rates}
        for rate, seed in itertools.product(rates, range(seeds)):
            problem = load(seed)
            losses[rate].append(problem.loss(train(problem, workers, rate, steps, **options)))
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


# by a word of the name: colour, and what the legend says
SERIES = {
    "synchronous": ("#222", "synchronous"),
    "stale": ("#d62728", "stale gradients, by so many updates"),
    "average": ("#1f77b4", "local steps, average"),
    "nesterov": ("#2ca02c", "local steps, nesterov"),
}
WIDTH, HEIGHT, LEFT, TOP, GAP = 380, 300, 70, 34, 70  # of the panels, and around them


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """Return an SVG: loss over the megabytes that a worker sends, a panel for each number of workers.

    A dot is the mean of the runs, the line through it their range.
    """
    rows = [row for row in rows if "not averaged" not in row["way"]]
    losses = [loss for row in rows for loss in row["losses"]]
    lowest = 0.0 if 2 * min(losses) < max(losses) else math.floor(min(losses) * 10) / 10
    scale = lowest, math.ceil(max(losses) * 10) / 10
    powers = [
        f(math.log10(g(r["megabytes"] for r in rows))) for f, g in ((math.floor, min), (math.ceil, max))
    ]
    parts = []
    for panel, workers in enumerate((2, 4)):
        left = LEFT + panel * (WIDTH + GAP)
        parts += _axes(left, f"{workers} workers", powers, scale)
        for row in rows:
            if row["workers"] == workers:
                x = left + (math.log10(row["megabytes"]) - powers[0]) / (powers[1] - powers[0]) * WIDTH
                ys = [_height(loss, scale) for loss in row["losses"]]
                parts += _point(row["way"], x, ys)
    place = LEFT
    for color, text in SERIES.values():
        parts.append(f'<circle cx="{place}" cy="{TOP + HEIGHT + 62}" r="4" fill="{color}"/>')
        parts.append(f'<text x="{place + 9}" y="{TOP + HEIGHT + 66}">{text}</text>')
        place += 60 + 6 * len(text)
    size = f'width="{LEFT + 2 * WIDTH + GAP + 20}" height="{TOP + HEIGHT + 80}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([start, background, *parts, "</svg>", ""])


def _height(loss: float, scale: tuple[float, float]) -> float:
    """Return where a loss lies in a panel whose ends are two losses."""
    lowest, highest = scale
    return TOP + (highest - loss) / (highest - lowest) * HEIGHT


def _axes(left: int, title: str, powers: Sequence[int], scale: tuple[float, float]) -> list[str]:
    middle, bottom = left + WIDTH / 2, TOP + HEIGHT
    parts = [
        f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{middle}" y="22" text-anchor="middle" font-weight="bold">{title}</text>',
        f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle">megabytes that one worker sends</text>',
        f'<text transform="translate({left - 40} {TOP + HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        "loss on held-out data</text>",
    ]
    for power in range(powers[0], powers[1] + 1):
        x = left + (power - powers[0]) / (powers[1] - powers[0]) * WIDTH
        parts.append(f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{10**power:g}</text>')
        parts.append(f'<path d="M{x} {bottom}v-5" stroke="#999"/>')
    for tenths in range(round(scale[0] * 10), round(scale[1] * 10) + 1):
        y = _height(tenths / 10, scale)
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tenths / 10:g}</text>')
        parts.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#eee"/>')
    return parts


def _point(way: str, x: float, ys: Sequence[float]) -> list[str]:
    """Return a dot with its range; its label stands where dots with as many bytes have none."""
    word = next(word for word in SERIES if word in way)
    color, y = SERIES[word][0], float(np.mean(ys))
    label = way.removeprefix("local steps, ").partition(", ")[0].removeprefix("stale by ")
    at, anchor = (x, min(ys) - 7), "middle"
    if word in ("stale", "average"):
        at, anchor = (x - 9, y + 4), "end"
    elif word == "synchronous":
        at = x, max(ys) + 16
    return [
        f'<path d="M{x:.1f} {min(ys):.1f}V{max(ys):.1f}" stroke="{color}"/>',
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>',
        f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}" fill="{color}">{label}</text>',
    ]


def main() -> None:
    """Measure, or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("text", nargs="?", type=Path, help="a text file; digits if not given")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 4e-3, 1e-2, 2.5e-2, 5e-2, 0.1])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("JSON", "SVG"))
    given = parser.parse_args()
    if given.draw:
        given.draw[1].write_text(draw(json.loads(given.draw[0].read_text())))
        return
    load: Any = DigitImages if given.text is None else partial(Text, given.text)
    rows = list(measured(load, given.steps, given.rates, given.seeds))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
