"""A picture of speed against workers, if matplotlib is installed."""

import io
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.tools.spread import Spread

_SUFFIXES = (".png", ".svg", ".html")


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn."""
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"--picture {path}: the name must end in {', '.join(_SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise UsageError(
            f"--picture {path}: matplotlib, which draws it, is not installed",
            "Install it: python -m pip install matplotlib. Or write the figures with --json FILE.",
        )


def draw(curves: Mapping[str, Sequence[tuple[int, Spread]]], path: Path) -> None:
    """Draw efficiency with its range against workers."""
    figure = new_figure()
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
    save_figure(figure, path)


def new_figure() -> Any:
    """Return an empty figure of matplotlib."""
    return import_module("matplotlib.figure").Figure(figsize=(7.0, 4.2), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure to a file, whose suffix names the format."""
    if path.suffix.lower() != ".html":
        figure.savefig(path)
        return
    text = io.StringIO()
    figure.savefig(text, format="svg")
    svg = text.getvalue()
    page = f'<!DOCTYPE html>\n<meta charset="utf-8">\n<title>hvdtrain</title>\n{svg[svg.index("<svg") :]}'
    path.write_text(page, encoding="utf-8")
