"""Pictures of what was measured, if matplotlib is installed."""

import io
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.tools.spread import Spread

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
