"""Measured numbers with their spread, the parts of a step, and pictures, if matplotlib is installed."""

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError

_FEW = 3.0  # of half a range, what its last digit should stand for at most


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements, and the lowest and the highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of one measurement or more."""
        return cls(statistics.median(values), min(values), max(values))

    def times(self, factor: float) -> "Spread":
        """Return it in another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)

    def describe(self, digits: int = 2) -> str:
        """Return it as a text: the median, and the range in parentheses."""
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"

    def describe_rounded(self) -> str:
        """Return the same in no more digits than the range supports."""
        half = max((self.high - self.low) / 2, abs(self.median) * 1e-3)
        place = math.floor(math.log10(half / _FEW)) if half > 0 else 0
        return "{} ({} to {})".format(*(_rounded(one, place) for one in (self.median, self.low, self.high)))

    def to_dict(self) -> dict[str, float]:
        """Return it for a JSON document."""
        return asdict(self)


def _rounded(value: float, place: int) -> str:
    """Return a number up to a power of ten, or to its first digit if that stands behind it."""
    if value:
        place = min(place, math.floor(math.log10(abs(value))))
    return f"{round(value, -place):,.{max(0, -place)}f}"


def in_digits(value: float, digits: int) -> str:
    """Return a number with so many digits that count, and without an exponent."""
    return f"{float(f'{value:.{digits}g}'):,.15g}"


@dataclass(frozen=True)
class Block:
    """Steps that were timed one after the other on all workers."""

    step_seconds: Sequence[Sequence[float]]  # by rank, how long each step took
    wait_seconds: float  # how long a worker waited for data in a step, on average

    @property
    def mean_seconds(self) -> float:
        """The mean step of all workers."""
        return statistics.fmean(map(statistics.fmean, self.step_seconds))

    @property
    def slowest_seconds(self) -> float:
        """The mean over the steps of the slowest worker's time: what a step takes if all wait for it."""
        return statistics.fmean(max(of_step) for of_step in zip(*self.step_seconds, strict=True))


PARTS = ("data", "compute", "slowest", "communication")


def split_of(job: Block, alone: Block | None) -> dict[str, float]:
    """Return the parts of a step, which add up to it."""
    data = job.wait_seconds
    if alone is None:
        return dict(zip(PARTS, (data, job.mean_seconds - data, 0.0, 0.0), strict=True))
    compute = alone.mean_seconds - alone.wait_seconds
    slowest = alone.slowest_seconds - alone.mean_seconds
    rest = job.mean_seconds - data - compute - slowest
    return dict(zip(PARTS, (data, compute, slowest, rest), strict=True))


_SUFFIXES = (".png", ".svg", ".html")
_ABOVE_FIRST = 0.5  # of the first loss, by which a picture shows higher ones


def check_picture(path: Path | None) -> None:
    """Check that a picture can be drawn, if one is wanted."""
    if path is None:
        return
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"--picture {path}: the name must end in {', '.join(_SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise UsageError(
            f"--picture {path}: matplotlib, which draws it, is not installed",
            "Install it: python -m pip install matplotlib. Or write the figures with --json FILE.",
        )


def draw(curves: Mapping[str, Sequence[tuple[int, Spread]]], path: Path) -> None:
    """Draw efficiency with its range against workers."""
    figure = _new_figure()
    axes = figure.add_subplot()
    for name, points in curves.items():
        workers, spreads = zip(*points, strict=True)
        axes.plot(workers, [one.median for one in spreads], marker="o", label=name)
        axes.fill_between(workers, [one.low for one in spreads], [one.high for one in spreads], alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0)
    axes.set_xlabel("workers")
    axes.set_ylabel("efficiency")
    axes.legend()
    _save_figure(figure, path)


def draw_rates(document: Mapping[str, Any], path: Path) -> None:
    """Draw the curve of a document of ``LearningRates``."""
    figure = _new_figure()
    axes = figure.add_subplot()
    rates, losses, means = ([one[name] for one in document["curve"]] for name in ("rate", "loss", "smoothed"))
    axes.plot(rates, losses, alpha=0.35, label="loss")
    axes.plot(rates, means, label="smoothed")
    highest = means[0] + _ABOVE_FIRST * abs(means[0])  # a divergence would flatten all that is below it
    if max(losses) > highest:
        axes.set_ylim(min(losses) - 0.05 * (highest - min(losses)), highest)
    for style, one in zip(("--", ":"), document["suggestions"], strict=False):
        label = f"{one['reason']}: --learning-rate {one['learning_rate']:g}"
        axes.axvline(one["peak"], color="black", linestyle=style, label=label)
    label = f"peak learning rate, global batch {document['global_batch']}"
    title = f"{document['task']}, {document['device']}"
    axes.set(xscale="log", xlabel=label, ylabel="loss", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    _save_figure(figure, path)


def _new_figure() -> Any:
    """Return an empty figure of matplotlib."""
    return import_module("matplotlib.figure").Figure(figsize=(7.0, 4.2), layout="constrained")


def _save_figure(figure: Any, path: Path) -> None:
    """Write a figure to a file, whose suffix names the format."""
    if path.suffix.lower() != ".html":
        figure.savefig(path)
        return
    text = io.StringIO()
    figure.savefig(text, format="svg")
    svg = text.getvalue()
    page = f'<!DOCTYPE html>\n<meta charset="utf-8">\n<title>hvdtrain</title>\n{svg[svg.index("<svg") :]}'
    path.write_text(page, encoding="utf-8")
