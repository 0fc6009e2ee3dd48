"""Draw docs/curves.svg, the loss curves of both frameworks, from the losses in docs/curves.csv.

    python scripts/draw_curves.py
    python scripts/draw_curves.py runs/torch-1 runs/torch-2 runs/tf-1 runs/tf-2

With run directories as arguments, their losses first replace those in docs/curves.csv. The first run is the
reference for the relative differences. The losses in docs/curves.csv are those of

    horovodrun -np 2 python -m hvdtrain examples/shakespeare.yaml --framework torch --steps 500 --log-every 1

with task_options.path set to the text that the example names, and of the same command with one worker and
with --framework tf. The script needs only Python's standard library.
"""

import csv
import json
import math
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
LOSSES, PICTURE = DOCS / "curves.csv", DOCS / "curves.svg"

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT = 70, WIDTH - 20  # of both plots
UPPER, LOWER = (48, 245), (300, 415)  # top and bottom of each plot
TOLERANCE = 1e-4  # of tests/parallel/test_curves.py
# colour and line width of each run; the lines become thinner, so that all of them are visible
STYLES = [("#f9c79b", 9), ("#e8710a", 5.5), ("#7db4ff", 3), ("#0b57d0", 1.2)]
# follows the colour scheme of the reader's system, background included
THEME = """
  .back { fill: #ffffff } .frame { stroke: #d0d7de } text { fill: #1f2328; font: 13px system-ui, sans-serif }
  .title { font-weight: 600; font-size: 14px } .grid { stroke: #d8dee4 } .limit { stroke: #cf222e }
  polyline { fill: none }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117 } .frame { stroke: #30363d } text { fill: #e6edf3 } .grid { stroke: #30363d }
  }"""

Losses = dict[str, list[float]]  # by the name of the run, "PyTorch, 1 worker"; one loss for each step


def read_run(run_dir: Path) -> tuple[str, list[float]]:
    """Return a run's name and its training losses, one for each step."""
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    losses = {line["step"]: line["loss"] for line in lines if line["phase"] == "train"}
    if sorted(losses) != list(range(1, len(losses) + 1)):
        raise SystemExit(f"{run_dir} does not contain every step: train with --log-every 1")
    plural = "s" if summary["workers"] > 1 else ""
    framework = {"torch": "PyTorch", "tf": "TensorFlow"}[summary["framework"]]
    return f"{framework}, {summary['workers']} worker{plural}", list(losses.values())


def write_losses(path: Path, losses: Losses) -> None:
    """Write the losses as CSV with one row for each step, exact to fp32."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *losses])
        for step, values in enumerate(zip(*losses.values(), strict=True), 1):
            writer.writerow([step, *(f"{value:.9g}" for value in values)])


def read_losses(path: Path) -> Losses:
    """Read what `write_losses` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    return {name: [float(row[column]) for row in rows] for column, name in enumerate(head) if column}


def draw(losses: Losses) -> str:
    """Return the picture as SVG: the losses, and below them their relative differences to the first run."""
    steps = len(next(iter(losses.values())))
    drawn = [value for values in losses.values() for value in values]
    ends = float(math.floor(min(drawn))), max(drawn) * 1.05
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>Loss curves of PyTorch and TensorFlow at 1 and 2 workers</title><style>{THEME}\n</style>",
        f'<rect class="back frame" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="6"/>',
        _text(LEFT, 28, "Training loss of a GPT", "start", "title"),
        _text(LEFT, 282, f"Relative difference from {next(iter(losses))}", "start", "title"),
        *_upper_plot(losses, steps, ends),
        *_legend(losses),
        *_lower_plot(losses, steps),
        _text((LEFT + RIGHT) / 2, HEIGHT - 10, "step", "middle"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _upper_plot(losses: Losses, steps: int, ends: tuple[float, float]) -> list[str]:
    parts = []
    for tick in range(int(ends[0]), math.floor(ends[1]) + 1):
        parts += _grid_line(_scale(tick, ends, UPPER), str(tick))
    for values, (colour, width) in zip(losses.values(), STYLES, strict=False):
        line = " ".join(f"{_x(i, steps):.1f},{_scale(v, ends, UPPER):.1f}" for i, v in enumerate(values, 1))
        parts.append(
            f'<polyline points="{line}" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>'
        )
    return parts


def _lower_plot(losses: Losses, steps: int) -> list[str]:
    """Return one dot for each step and run; dots of equal losses lie on the lowest line."""
    ends, parts = (-8.0, -3.0), []
    for power in range(-8, -2):
        label = "equal" if power == -8 else f"1e{power}"
        parts += _grid_line(_scale(power, ends, LOWER), label)
    for step in range(0, steps + 1, max(1, steps // 5)):
        parts.append(_text(_x(step, steps), LOWER[1] + 18, str(step), "middle"))
    limit = _scale(math.log10(TOLERANCE), ends, LOWER)
    parts.append(f'<path class="limit" d="M{LEFT} {limit:.1f}H{RIGHT}" stroke-dasharray="5 4"/>')
    parts.append(_text(RIGHT, limit - 5, "tolerance of the tests", "end"))
    reference, *others = losses.values()
    for values, (colour, _) in zip(others, STYLES[1:], strict=False):
        dots = ""
        for step, (value, expected) in enumerate(zip(values, reference, strict=True), 1):
            power = math.log10(max(abs(value / expected - 1), 10 ** ends[0]))
            dots += f"M{_x(step, steps):.1f} {_scale(power, ends, LOWER):.1f}h0"
        parts.append(f'<path d="{dots}" stroke="{colour}" stroke-width="2.4" stroke-linecap="round"/>')
    return parts


def _legend(losses: Losses) -> list[str]:
    parts = [f'<rect class="back" x="{RIGHT - 200}" y="{UPPER[0]}" width="200" height="96"/>']
    for row, (name, (colour, _)) in enumerate(zip(losses, STYLES, strict=False)):
        y = UPPER[0] + 22 + 22 * row
        parts.append(f'<path d="M{RIGHT - 190} {y - 4}h28" stroke="{colour}" stroke-width="6"/>')
        parts.append(_text(RIGHT - 152, y, name, "start"))
    return parts


def _grid_line(y: float, label: str) -> list[str]:
    return [f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>', _text(LEFT - 8, y + 4, label, "end")]


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    style = f' class="{style}"' if style else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{style}>{text}</text>'


def _x(step: int, steps: int) -> float:
    return LEFT + (RIGHT - LEFT) * step / steps


def _scale(value: float, ends: tuple[float, float], plot: tuple[int, int]) -> float:
    """Return the height at which a value lies in a plot."""
    return plot[1] - (plot[1] - plot[0]) * (value - ends[0]) / (ends[1] - ends[0])


def main(run_dirs: list[str]) -> None:
    """Replace the kept losses by those of the runs, if any are given, and draw the picture."""
    if run_dirs:
        write_losses(LOSSES, dict(read_run(Path(run_dir)) for run_dir in run_dirs))
    PICTURE.write_text(draw(read_losses(LOSSES)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
