"""The charts of a page: which curves of which runs each of them shows, drawn with Bokeh."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from bokeh import models
from bokeh.document import Document
from bokeh.embed.util import standalone_docs_json_and_render_items
from bokeh.models import BasicTickFormatter, ColumnDataSource, DataRange1d, HoverTool
from bokeh.plotting import figure
from numpy.typing import NDArray

from hvdtrain.callbacks import CALLBACK, EVAL, TRAIN
from hvdtrain.early_stopping import BAD_SAMPLES, PEAK_DEVICE_MEMORY, PEAK_MEMORY
from hvdtrain.tools.report.run_log import WORKERS, Curve, Numbers, RunLog

# of Okabe and Ito, which colour-blind people distinguish; without yellow, which is too light on white
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_DASHES = ((), (8, 4), (2, 3), (9, 3, 2, 3), (14, 4))
_POINTS = 14_000  # of all curves of a page together: each takes about 40 bytes of it
_FEWEST, _MOST = 40, 2_000  # points that a curve may have; the library leaves some out of more than 2,000
_LOGARITHMIC = 30.0  # times the lowest value, from which on losses have a logarithmic axis
_TOOLS = "pan,box_zoom,wheel_zoom,reset,save"
_TIPS = [("run", "$name"), ("value", "@value{%.6g}"), ("step", "@step{0,0}"), ("epoch", "@epoch{0.00}")]
_PHASES = {TRAIN: "training", EVAL: "evaluation", CALLBACK: "callback"}
# of training, in the order of their charts; those of evaluations are not drawn
_MEASURES = (
    "learning_rate", "samples_per_second", "data_wait_fraction", "wait_fraction", "slowest_rank", PEAK_MEMORY,
    PEAK_DEVICE_MEMORY, BAD_SAMPLES, WORKERS,
)  # fmt: skip
_DOTS = ("slowest_rank", BAD_SAMPLES)  # without lines between the points


class Style(NamedTuple):
    """The colour of a run's curves, and lengths of dashes and gaps in pixels; none for a solid line."""

    colour: str
    dashes: tuple[int, ...]

    @classmethod
    def of(cls, run: int) -> "Style":
        """Return the style of a run by its place among the runs."""
        return cls(_COLOURS[run % len(_COLOURS)], _DASHES[run % len(_DASHES)])


class Line(NamedTuple):
    """A curve of a run, which is given by its place among the runs."""

    run: int
    curve: Curve


class Chart(NamedTuple):
    """A chart: its title, its curves, and whether its vertical axis is logarithmic."""

    title: str
    lines: Sequence[Line]
    is_logarithmic: bool


def plan_charts(logs: Sequence[RunLog]) -> tuple[list[Chart], list[str]]:
    """Return the charts of runs, and what to say of them."""
    groups: dict[tuple[int, int, str], list[Line]] = {}
    for run, log in enumerate(logs):
        for curve in log.curves.values():
            if (key := _key_of(curve)) is not None:
                groups.setdefault(key, []).append(Line(run, curve))
    shown = []
    for (*_, title), lines in sorted(groups.items(), key=lambda group: group[0][:2]):
        values = np.concatenate([line.curve.values for line in lines])
        # not the same number of workers all the time
        if len(np.unique(values[np.isfinite(values)])) > (lines[0].curve.name == WORKERS):
            shown.append((title, lines))
    notes = []
    lengths = [len(line.curve.values) for _, lines in shown for line in lines]
    limit = min(_MOST, max(_FEWEST, _POINTS // max(1, len(lengths))))
    if max(lengths, default=0) > limit:
        text = "points are thinned out: of neighbours, the lowest and the highest are drawn."
        notes.append(f"Curves of more than {limit:,} {text}")
    charts = []
    for title, lines in shown:
        thinned = []
        for run, curve in lines:
            kept = thin(curve.values, limit)
            axes = {name: places[kept] for name, places in curve.axes.items()}
            thinned.append(Line(run, Curve(curve.phase, curve.name, axes, curve.values[kept])))
        values = np.concatenate([line.curve.values for line in thinned])
        lowest, highest = np.nanmin(values), np.nanmax(values)
        is_loss = lines[0].curve.name.endswith("loss")
        charts.append(Chart(title, thinned, bool(is_loss and highest > _LOGARITHMIC * lowest > 0)))
    return charts, notes


def _key_of(curve: Curve) -> tuple[int, int, str] | None:
    """Return where the chart of a curve is among the others, and its title; None for one without a chart."""
    if curve.phase == CALLBACK:
        return None if curve.name == WORKERS else (1, 0, f"{curve.name} of a callback")
    if curve.name in _MEASURES:
        place = 2, _MEASURES.index(curve.name), curve.name.replace("_", " ").replace("mib", "MiB")
        return place if curve.phase == TRAIN else None
    return 0, curve.name.count("/") + (curve.name != "loss"), curve.name


def thin(values: Numbers, limit: int) -> NDArray[np.intp]:
    """Return the indices of a curve's ends, and of the lowest, highest and a bad point of each part."""
    count = len(values)
    if count <= limit:
        return np.arange(count)
    kept = {0, count - 1}
    for bucket in np.array_split(np.arange(count), max(1, (limit - 2) // 2)):
        is_finite = np.isfinite(values[bucket])
        finite, others = bucket[is_finite], bucket[~is_finite]
        if len(finite):
            kept |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
        kept |= set(others[:1].tolist())
    return np.array(sorted(kept), dtype=np.intp)


def draw(
    charts: Sequence[Chart], names: Sequence[str]
) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """Return Bokeh's document of charts as JSON, what it renders where, and the ids of their places."""
    document, x_range = Document(), DataRange1d(only_visible=True, range_padding=0.02)
    figures = []
    for chart in charts:
        drawn = figure(
            height=270, min_width=200, sizing_mode="stretch_width", tools=_TOOLS, active_drag=None,
            x_range=x_range, y_axis_type="log" if chart.is_logarithmic else "linear", x_axis_label="steps",
            toolbar_location="above", name=chart.title,
        )  # fmt: skip
        drawn.y_range.only_visible = True
        drawn.toolbar.logo = None
        drawn.xaxis.formatter = BasicTickFormatter(use_scientific=False)
        drawn.xaxis.ticker.desired_num_ticks = 5  # numbers of six digits do not overlap on a phone
        has_both = len({line.curve.phase for line in chart.lines}) > 1
        parts = [part for line in chart.lines for part in _draw_line(drawn, line, names[line.run], has_both)]
        drawn.add_tools(HoverTool(
            renderers=parts, tooltips=_TIPS, formatters={"@value": "printf"}, line_policy="nearest"
        ))  # fmt: skip
        document.add_root(drawn)
        figures.append(drawn)
    documents, items = standalone_docs_json_and_render_items(document)
    rendered: list[dict[str, Any]] = [dict(item.to_json()) for item in items]
    return dict(documents), rendered, [str(rendered[0]["roots"][drawn.id]) for drawn in figures]


def _draw_line(drawn: Any, line: Line, name: str, has_both: bool) -> list[Any]:
    """Draw a curve, training thinner than evaluations if the chart has both; return the parts."""
    curve, style = line.curve, Style.of(line.run)
    source = ColumnDataSource({
        **{axis: places.astype(np.float32 if axis in ("epoch", "seconds") else np.float64)
           for axis, places in curve.axes.items()},
        "value": curve.values.astype(np.float32),
    })  # fmt: skip
    is_thin = has_both and curve.phase == TRAIN
    glyphs: list[Any] = []
    if curve.name not in _DOTS:
        glyphs.append(models.Line(
            x="step", y="value", line_color=style.colour, line_dash=list(style.dashes) or "solid",
            line_width=1.2 if is_thin else 2, line_alpha=0.65 if is_thin else 1.0,
        ))  # fmt: skip
    if curve.name in _DOTS or len(curve.values) <= (_FEWEST if curve.phase == EVAL else 3):
        size, colour = 4 if is_thin or curve.name in _DOTS else 7, style.colour
        glyphs.append(models.Scatter(x="step", y="value", size=size, line_color=colour, fill_color=colour))
    label = f"{name}, {_PHASES[curve.phase]}" if has_both else name
    tags = [f"run:{line.run}", f"phase:{curve.phase}"]
    return [drawn.add_glyph(source, glyph, name=label, tags=tags) for glyph in glyphs]
