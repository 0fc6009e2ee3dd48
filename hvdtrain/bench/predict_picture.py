"""A picture of a plan: efficiency against workers, for each controller, link and way."""

from typing import Any

_INCHES = (3.6, 3.0)  # of one controller and link


def draw_plan(figure: Any, document: dict[str, Any]) -> None:
    """Draw the predictions of a plan, with their ranges.

    Args:
        figure: matplotlib's figure.
        document: the plan's document.
    """
    predictions = document["predictions"]
    controllers = list(dict.fromkeys(one["controller"] for one in predictions))
    links = list(dict.fromkeys(one["link"] for one in predictions))
    titles = {one["measured"]["controller"]: _titles(one["measured"]) for one in document["measurements"]}
    figure.set_size_inches(_INCHES[0] * len(links), _INCHES[1] * len(controllers))
    grid = figure.subplots(len(controllers), len(links), squeeze=False, sharex=True, sharey=True)
    for controller, row in zip(controllers, grid, strict=True):
        for link, axes in zip(links, row, strict=True):
            found = [one for one in predictions if (one["controller"], one["link"]) == (controller, link)]
            _draw_ways(axes, found)
            network, without_link = titles[controller]
            axes.set_title(f"{network}, {link or without_link}")
    for axes in grid[-1]:
        axes.set_xlabel("workers")
    for row in grid:
        row[0].set_ylabel("efficiency")
    grid[0][0].legend()


def _titles(measured: dict[str, Any]) -> tuple[str, str]:
    """Return what coordinates workers and moves bytes, and what a prediction without a link is of."""
    network = f"{measured['controller']} with NCCL" if measured["on_gpu"] else measured["controller"]
    return network, "measured network" if measured["hosts"] > 1 else "one host"


def _draw_ways(axes: Any, predictions: list[dict[str, Any]]) -> None:
    for way in dict.fromkeys(one["way"] for one in predictions):
        found = [one for one in predictions if one["way"] == way]
        workers = [one["workers"] for one in found]
        low, median, high = ([one["efficiency"][end] for one in found] for end in ("low", "median", "high"))
        axes.plot(workers, median, marker="o", markersize=3, label=way)
        axes.fill_between(workers, low, high, alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(0, 1.02)
