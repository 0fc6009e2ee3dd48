"""A picture of what was measured, if matplotlib is installed."""

import io
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError

_SUFFIXES = (".png", ".svg", ".html")
_SIZE_INCHES = (7.0, 4.2)


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn.

    Raises:
        UsageError: If its format is not known, or matplotlib is not installed.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"--picture {path}: the name must end in {', '.join(_SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise UsageError(
            f"--picture {path}: matplotlib, which draws it, is not installed",
            "Install it: python -m pip install matplotlib. Or write the figures with --json FILE.",
        )


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw what a JSON document of ``bench`` or ``plan`` says.

    Args:
        document: the document.
        path: the file; its suffix tells the format.
    """
    figure = new_figure()
    if "sweep" in document:
        _draw_sweep(figure, document)
    elif "predictions" in document:
        _draw_plan(figure, document)
    else:
        _draw_job(figure, document)
    save_figure(figure, path)


def new_figure() -> Any:
    """Return an empty figure of matplotlib."""
    return import_module("matplotlib.figure").Figure(figsize=_SIZE_INCHES, layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure to a file, whose suffix tells the format.

    Raises:
        OSError: If it cannot be written.
    """
    if path.suffix.lower() != ".html":
        figure.savefig(path)
        return
    text = io.StringIO()
    figure.savefig(text, format="svg")
    svg = text.getvalue()
    page = (
        f'<!DOCTYPE html>\n<meta charset="utf-8">\n<title>hvdtrain bench</title>\n{svg[svg.index("<svg") :]}'
    )
    path.write_text(page, encoding="utf-8")


def _draw_job(figure: Any, document: dict[str, Any]) -> None:
    messages = document["all_reduce"]
    of_step = figure.add_subplot(1, 2 if messages else 1, 1)
    bottom = 0.0
    for name, part in document["part_seconds"].items():
        height = max(part["median"] * 1e3, 0.0)
        of_step.bar(["step"], [height], bottom=[bottom], label=name)
        bottom += height
    if not document["part_seconds"]:
        of_step.bar(["step"], [document["step_seconds"]["median"] * 1e3])
    else:
        of_step.legend()
    of_step.set_ylabel("ms")
    of_step.set_title(f"{document['task']}, {document['workers']} workers")
    if not messages:
        return
    of_messages = figure.add_subplot(1, 2, 2)
    sizes = [one["bytes"] for one in messages]
    of_messages.loglog(
        sizes, [1e3 * one["horovod_seconds"]["median"] for one in messages], marker="o", label="Horovod"
    )
    of_messages.set_xlabel("bytes")
    of_messages.set_ylabel("ms")
    of_messages.set_title("all-reduce")
    of_messages.legend()


def _draw_plan(figure: Any, document: dict[str, Any]) -> None:
    """Draw efficiency with its range against workers, a curve for each controller and link."""
    axes = figure.add_subplot()
    predictions = document["predictions"]
    for controller, link in dict.fromkeys((one["controller"], one["link"]) for one in predictions):
        found = [one for one in predictions if (one["controller"], one["link"]) == (controller, link)]
        workers = [one["workers"] for one in found]
        low, median, high = ([one["efficiency"][end] for one in found] for end in ("low", "median", "high"))
        axes.plot(workers, median, marker="o", label=f"{controller}, {link}" if link else controller)
        axes.fill_between(workers, low, high, alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("workers")
    axes.set_ylabel("efficiency")
    axes.legend()


def _draw_sweep(figure: Any, document: dict[str, Any]) -> None:
    axes = figure.add_subplot()
    rows = document["sweep"]
    workers = [row["workers"] for row in rows]
    first = rows[0]["samples_per_second"]["median"] / workers[0]
    axes.plot(workers, [row["samples_per_second"]["median"] for row in rows], marker="o", label="measured")
    axes.plot(workers, [first * count for count in workers], linestyle=":", label="ideal")
    axes.set_xlabel("workers")
    axes.set_ylabel("samples/s")
    axes.legend()
