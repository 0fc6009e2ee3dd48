"""Draw the pictures of docs/speed.md, and print its tables.

    python benchmarks/speed.py

docs/speed-link.svg shows what benchmarks/README.md has measured over a link of 200 Mbit/s.
docs/speed-workers.svg and the tables follow from the formula of docs/scaling.md: one worker on each host, the
time of computing that benchmarks/README.md has, and what encoding takes relative to it. Nothing is measured
here. To plan a job of your own, use ``python -m hvdtrain plan``.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdtrain.tools.bench.forecast import ENDS, Cluster, Measured, Parts, parts_of
from hvdtrain.tools.bench.options import parse_link
from hvdtrain.tools.message_times import buffers, local_steps, low_rank
from hvdtrain.tools.spread import Spread

ROOT = Path(__file__).resolve().parent.parent
PICTURES = {"link": ROOT / "docs" / "speed-link.svg", "workers": ROOT / "docs" / "speed-workers.svg"}

# the mlp of overhead.py, and a step of it with one worker and one thread (benchmarks/README.md)
SHAPES = [shape for inner in (64, 1400, 1400, 1400) for shape in ((inner, 1400), (1400,))] + [
    (1400, 10),
    (10,),
]
COMPUTE_SECONDS = 19.4e-3
# What encoding takes, in times of computing: the mean and the values of two runs of 2 workers with one thread
# each, in which an earlier version of plan timed it. Other processes used 1.4 and 1.7 of the two cores;
# steps took 4 and 10 times as long as when idle.
ENCODING = {"fp16": Spread(0.14, 0.11, 0.17), "powersgd:4": Spread(2.3, 2.15, 2.45)}
NOTHING = Spread(0.0, 0.0, 0.0)
WORKERS = (2, 4, 8, 16, 32, 64)
LINKS = ("1gbit", "10gbit", "25gbit", "100gbit")
WAYS = {
    "none": buffers(SHAPES),
    "fp16": buffers(SHAPES, "fp16"),
    "batch x 4": buffers(SHAPES),
    "sync-every 10": local_steps(SHAPES, 10, 1),
    "powersgd:4": low_rank(SHAPES, 4),
}
SMALL = buffers([(1000,)])
# Okabe and Ito's colours, which are told apart with each kind of colour blindness
BLACK, BLUE, ORANGE, GREEN, RED = "#222", "#0072b2", "#e69f00", "#009e73", "#d55e00"
OF_LINKS, OF_WAYS = (BLACK, BLUE, ORANGE, GREEN), (BLUE, ORANGE, GREEN, RED, BLACK)

WIDTH, HEIGHT, LEFT, TOP, GAP = 250, 220, 62, 34, 150  # of the panels, and around them


def job(controller: str, name: str) -> Measured:
    """Return a job whose workers wait for nobody and whose hosts cost nothing but for encoding.

    Args:
        controller: "MPI" or "Gloo".
        name: of its way; with "batch x 4" its batch is four times as large.
    """
    times = 4 if name == "batch x 4" else 1
    compute = Spread(*[times * COMPUTE_SECONDS] * 3)
    encoding = ENCODING.get(name, NOTHING).times(COMPUTE_SECONDS)
    step = Spread(*(getattr(compute, end) + getattr(encoding, end) for end in ("median", "low", "high")))
    return Measured(
        workers=2, hosts=1, slots=2, controller=controller, on_gpu=False, samples=32.0 * times,
        way=WAYS.get(name, SMALL), step=step, data=NOTHING, compute=compute, slowest=NOTHING,
        smallest=NOTHING, byte=NOTHING,
    )  # fmt: skip


def parts(controller: str, name: str, workers: int, link: str) -> dict[str, Parts]:
    """Return the parts of a step with one worker on each host: likely, at best, at worst."""
    cluster = Cluster(workers, 1, parse_link(link))
    return {end: parts_of(job(controller, name), cluster, end) for end in ENDS}


def latency_table() -> str:
    """Return what the latency of a step takes, in Markdown."""
    latencies = {"50 us": "10gbit/50us", "5 ms": "10gbit/5ms", "20 ms": "10gbit/20ms"}
    columns = [(controller, name) for name in latencies for controller in ("MPI", "Gloo")]
    lines = ["| workers | " + " | ".join(f"{name}, {controller}" for controller, name in columns) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for workers in WORKERS:
        cells = [str(workers)]
        for controller, name in columns:
            found = parts(controller, "small", workers, latencies[name])
            spread = Spread(*(found[end].latency for end in ENDS))
            cells.append(spread.times(1e3).describe_rounded())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ways_table(workers: int = 16) -> str:
    """Return the efficiency of each way over each link, in Markdown."""
    lines = ["| | " + " | ".join(link.replace("gbit", " Gbit/s") for link in LINKS) + " |", "|---" * 5 + "|"]
    for name in WAYS:
        shares = (parts("MPI", name, workers, link)["median"].efficiency for link in LINKS)
        lines.append(f"| {name} | " + " | ".join(f"{share:.0%}" for share in shares) + " |")
    return "\n".join(lines)


def draw_workers() -> str:
    """Return an SVG: efficiency against workers, for each link, and for each way over one link."""
    links = [(link.replace("gbit", " Gbit/s"), "none", link) for link in LINKS]
    ways = [(name, name, "10gbit") for name in WAYS]
    panels = [("MPI, without compression", links, OF_LINKS), ("MPI, over 10 Gbit/s", ways, OF_WAYS)]
    lines = []
    for number, (title, series, colors) in enumerate(panels):
        left = LEFT + number * (WIDTH + GAP)
        lines += _frame(left, title, "workers, one on each host", "efficiency, %")
        for place, workers in enumerate(WORKERS):
            lines += _tick(left + place * WIDTH / (len(WORKERS) - 1), str(workers))
        for percent in range(0, 101, 20):
            lines += _line(left, TOP + (1 - percent / 100) * HEIGHT, str(percent))
        labels = []
        for color, (label, way, link) in zip(colors, series, strict=True):
            curves = {
                end: [parts("MPI", way, workers, link)[end].efficiency for workers in WORKERS] for end in ENDS
            }
            lines += _curve(left, color, curves)
            labels.append((TOP + (1 - curves["median"][-1]) * HEIGHT, label, color))
        lines += _labels(left + WIDTH + 8, labels)
    return _svg(LEFT + 2 * (WIDTH + GAP) - 30, TOP + HEIGHT + 46, "Efficiency against workers", lines)


def measured_over_a_link() -> Iterator[tuple[str, str, float, float, float]]:
    """Yield what benchmarks/README.md has: a job, its compression, and milliseconds of a step.

    The milliseconds are without a limit of the link, with it, and as predicted.
    """
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Compression over a slow link")[2].partition("\n## ")[0]
    titles = {"torch": "PyTorch", "tf": "TensorFlow"}
    controller = framework = ""
    for row in re.findall(r"^\|(.*)\|$", section, re.MULTILINE)[2:]:
        cells = [cell.strip() for cell in row.split("|")]
        controller, framework = cells[0] or controller, cells[1] or framework
        free, limited, predicted = (float(re.match(r"\d+", cell)[0]) for cell in cells[4:7])
        yield f"{controller}, {titles[framework]}", cells[2], free, limited, predicted


def draw_link() -> str:
    """Return an SVG: the step of a job over a link of 200 Mbit/s, measured and predicted."""
    left, width, most, thick = 160, 440, 700, 17
    rows = list(measured_over_a_link())
    height = len(rows) * (thick + 9) - 9
    lines = []
    for value in range(0, most + 1, 100):
        x = left + width * value / most
        lines.append(f'<path d="M{x:.1f} {TOP}v{height}" stroke="#ddd"/>')
        lines.append(_text(x, TOP + height + 17, f"{value}", "middle"))
    lines.append(_text(left + width / 2, TOP + height + 36, "milliseconds of a step", "middle"))
    for place, (name, way, free, limited, predicted) in enumerate(rows):
        y = TOP + place * (thick + 9)
        color = BLUE if way == "none" else ORANGE
        label = f"{name}, {way}" if way == "none" else way
        lines.append(_text(left - 8, y + 13, label, "end"))
        for value, opacity in ((limited, 0.45), (free, 1)):
            size = f'width="{width * value / most:.1f}" height="{thick}"'
            lines.append(f'<rect x="{left}" y="{y}" {size} fill="{color}" fill-opacity="{opacity}"/>')
        x = left + width * predicted / most
        lines.append(f'<path d="M{x:.1f} {y - 3}v{thick + 6}" stroke="{BLACK}" stroke-width="3"/>')
    words = "full colour: without a limit; light: with a link of 200 Mbit/s; black mark: predicted for it"
    lines.append(_text(left - 150, TOP - 14, words, "start"))
    return _svg(left + width + 20, TOP + height + 46, "A step over a link of 200 Mbit/s", lines)


def _svg(width: int, height: int, title: str, lines: Sequence[str]) -> str:
    size = f'width="{width}" height="{height}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([start, f"<title>{title}</title>", background, *lines, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{text}</text>'


def _frame(left: int, title: str, below: str, beside: str) -> list[str]:
    middle = left + WIDTH / 2
    turned = f'transform="translate({left - 38} {TOP + HEIGHT / 2}) rotate(-90)" text-anchor="middle"'
    return [
        f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        _text(middle, 22, title, "middle", ' font-weight="bold"'),
        _text(middle, TOP + HEIGHT + 36, below, "middle"),
        f"<text {turned}>{beside}</text>",
    ]


def _tick(x: float, text: str) -> list[str]:
    bottom = TOP + HEIGHT
    return [_text(x, bottom + 17, text, "middle"), f'<path d="M{x:.1f} {bottom}v-5" stroke="#999"/>']


def _line(left: int, y: float, text: str) -> list[str]:
    return [_text(left - 8, y + 4, text, "end"), f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#eee"/>']


def _curve(left: int, color: str, curves: dict[str, list[float]]) -> list[str]:
    """Return a line with dots through the likely values, on an area from the worst to the best."""
    xs = [left + place * WIDTH / (len(WORKERS) - 1) for place in range(len(WORKERS))]
    points = {
        end: [f"{x:.1f},{TOP + (1 - share) * HEIGHT:.1f}" for x, share in zip(xs, shares, strict=True)]
        for end, shares in curves.items()
    }
    area = " ".join([*points["low"], *reversed(points["high"])])
    dots = (point.split(",") for point in points["median"])
    return [
        f'<polygon points="{area}" fill="{color}" fill-opacity="0.13"/>',
        f'<polyline points="{" ".join(points["median"])}" fill="none" stroke="{color}" stroke-width="2"/>',
        *(f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in dots),
    ]


def _labels(x: float, labels: Sequence[tuple[float, str, str]]) -> list[str]:
    """Return the names of curves beside their ends, each at least a line below the one above it."""
    lines, above = [], 0.0
    for y, text, color in sorted(labels):
        above = max(y + 4, above + 14)
        lines.append(_text(x, above, text, "start", f' fill="{color}"'))
    return lines


def main() -> None:
    """Write the pictures and print the tables."""
    for name, draw in (("link", draw_link), ("workers", draw_workers)):
        PICTURES[name].write_text(draw(), encoding="utf-8")
    print(f"{latency_table()}\n\n{ways_table()}")


if __name__ == "__main__":
    main()
