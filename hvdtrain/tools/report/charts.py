"""Charts drawn with Bokeh."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from bokeh import models
from bokeh.document import Document
from bokeh.embed.util import standalone_docs_json_and_render_items
from bokeh.models import BasicTickFormatter, ColumnDataSource, DataRange1d, HoverTool
from bokeh.plotting import figure

from hvdtrain.reporting.records import EVAL
from hvdtrain.tools.report.chart_plan import AXES, Chart, Curve, Line
from hvdtrain.tools.report.events import RunEvent

# of Okabe and Ito, which colour-blind people tell apart; without yellow, which is too light on white
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_DASHES = ((), (8, 4), (2, 3), (9, 3, 2, 3), (14, 4))
# the library's names, and characters that look the same
_MARKERS = (
    ("circle", "●"), ("square", "■"), ("triangle", "▲"), ("diamond", "◆"), ("inverted_triangle", "▼"),
    ("x", "✕"), ("star", "★"), ("cross", "✚"),
)  # fmt: skip


class Style(NamedTuple):
    """How a run's curves look.

    Attributes:
        colour: in hexadecimal.
        dashes: lengths of dashes and gaps in pixels; empty for a solid line.
        marker: the library's name of the marker.
        sign: a character that looks like the marker.
    """

    colour: str
    dashes: tuple[int, ...]
    marker: str
    sign: str


def style_of(run: int) -> Style:
    """Return the style of a run by its place among the runs."""
    marker, sign = _MARKERS[run % len(_MARKERS)]
    return Style(_COLOURS[run % len(_COLOURS)], _DASHES[run % len(_DASHES)], marker, sign)


_HEIGHT = 270
_TEXT, _GRID = "#1a1a1a", "#dddddd"
MANY = 16  # runs, beyond which curves have no markers and the page no whole configs
_MOST_MARKERS = 12  # of a long curve
_SHORT = 40  # points, up to which all have a marker
_LARGEST_INT = 2**31
_TOOLS = "pan,box_zoom,wheel_zoom,reset,save"
_SHOWN_EVENTS = {"resumed", "workers"}


class _Sources:
    """Columns of points: curves whose points lie at the same places share those of the axes."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, bytes], ColumnDataSource] = {}

    def add(self, line: Line, column: str) -> ColumnDataSource:
        """Return the source of a curve, whose values are in a column of this name there."""
        curve = line.curve
        key = line.run, curve.phase, curve.axes["step"].tobytes()
        if key not in self._known:
            self._known[key] = ColumnDataSource(_columns(curve))
        source = self._known[key]
        source.data[column] = curve.values.astype(np.float32)
        return source


def draw(
    charts: Sequence[Chart], names: Sequence[str], histories: Sequence[Sequence[RunEvent]]
) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """Draw charts, which share their horizontal axis.

    Args:
        charts: the charts.
        names: the runs' names.
        histories: events of each run.

    Returns:
        Bokeh's document as JSON, what it renders where, and the ids of the places, one for each chart.
    """
    document, x_range = Document(), DataRange1d(only_visible=True, range_padding=0.02)
    sources, events = _Sources(), [_event_source(history) for history in histories]
    figures = []
    for number, chart in enumerate(charts):
        drawn = _figure(chart, x_range)
        column = f"y{number}"
        renderers = [
            found
            for line in chart.lines
            for found in _draw_line(drawn, line, _look(chart, line, names), column, sources.add(line, column))
        ]
        drawn.add_tools(_hover(renderers, column))
        for run in sorted({line.run for line in chart.lines}):
            if (source := events[run]) is not None:
                _draw_events(drawn, source, run)
        document.add_root(drawn)
        figures.append(drawn)
    documents, items = standalone_docs_json_and_render_items(document)
    rendered: list[dict[str, Any]] = [dict(item.to_json()) for item in items]
    places = [str(rendered[0]["roots"][drawn.id]) for drawn in figures]
    return dict(documents), rendered, places


def _figure(chart: Chart, x_range: DataRange1d) -> Any:
    drawn = figure(
        height=_HEIGHT, min_width=200, sizing_mode="stretch_width", tools=_TOOLS, active_drag=None,
        x_range=x_range, y_axis_type="log" if chart.is_logarithmic else "linear", toolbar_location="above",
        x_axis_label="steps", name=chart.title,
    )  # fmt: skip
    drawn.y_range.only_visible = True
    drawn.toolbar.logo = None
    drawn.grid.grid_line_color = _GRID
    drawn.outline_line_color = None
    for axis in drawn.axis:
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_color = axis.major_label_text_color = axis.axis_line_color = _TEXT
        axis.minor_tick_line_color = None
    if chart.is_whole:
        drawn.yaxis.ticker.min_interval = 1
    drawn.xaxis.formatter = BasicTickFormatter(use_scientific=False)
    drawn.xaxis.ticker.desired_num_ticks = 5  # numbers of six digits do not overlap on a phone
    return drawn


def _hover(renderers: Sequence[Any], column: str) -> HoverTool:
    tips = [
        ("run", "$name"),
        ("value", f"@{column}{{%.6g}}"),
        ("step", "@step{0,0}"),
        ("epoch", "@epoch{0.00}"),
    ]
    return HoverTool(
        renderers=list(renderers), tooltips=tips, formatters={f"@{column}": "printf"}, line_policy="nearest"
    )


class _Look(NamedTuple):
    """How a curve looks in a chart.

    Attributes:
        label: what the pointer shows.
        is_thin: whether it stands behind others: training behind evaluations.
        has_markers: whether some points have markers, besides those that no line shows.
        has_dots: whether its points are not joined.
    """

    label: str
    is_thin: bool
    has_markers: bool
    has_dots: bool


def _look(chart: Chart, line: Line, names: Sequence[str]) -> _Look:
    has_both = len({other.curve.phase for other in chart.lines}) > 1
    is_eval = line.curve.phase == EVAL
    label = f"{names[line.run]}, {'evaluation' if is_eval else 'training'}" if has_both else names[line.run]
    is_thin = has_both and not is_eval
    return _Look(label, is_thin, not is_thin and len(names) <= MANY, chart.has_dots)


def _draw_line(drawn: Any, line: Line, look: _Look, column: str, source: ColumnDataSource) -> list[Any]:
    """Draw a curve, and return what the pointer finds of it."""
    style = style_of(line.run)
    common: dict[str, Any] = {"name": look.label, "tags": [f"run:{line.run}", f"phase:{line.curve.phase}"]}
    found = []
    if not look.has_dots:
        glyph = models.Line(
            x="step", y=column, line_color=style.colour, line_dash=list(style.dashes) or "solid",
            line_width=1.2 if look.is_thin else 2, line_alpha=0.65 if look.is_thin else 1.0,
        )  # fmt: skip
        found.append(_add(drawn, source, glyph, **common))
    marked = _marked(line.curve, look, line.run)
    if marked:
        size = 4 if look.has_dots or look.is_thin else 7
        glyph = models.Scatter(
            x="step",
            y=column,
            marker=style.marker,
            size=size,
            line_color=style.colour,
            fill_color=style.colour,
        )
        view = models.CDSView(filter=models.IndexFilter(indices=marked))
        found.append(_add(drawn, source, glyph, view=view, **common))
    return found


def _add(drawn: Any, source: ColumnDataSource, glyph: Any, **options: Any) -> Any:
    """Add what is drawn, without the looks of selected points: there is no selection."""
    return drawn.add_glyph(
        source, glyph, selection_glyph=None, nonselection_glyph=None, muted_glyph=None, **options
    )


def _marked(curve: Curve, look: _Look, offset: int) -> list[int]:
    """Return the points that have markers: all of a short curve, some of a long one, and lone ones."""
    finite = np.isfinite(curve.values)
    if look.has_dots or (len(finite) <= _SHORT and look.has_markers):
        return [int(index) for index in np.flatnonzero(finite)]
    padded = np.concatenate([[False], finite, [False]])
    marked = finite & ~padded[:-2] & ~padded[2:]  # a line does not show them
    if look.has_markers:
        every = max(1, len(finite) // _MOST_MARKERS)
        marked[(offset * every // 5) % every :: every] |= finite[(offset * every // 5) % every :: every]
    return [int(index) for index in np.flatnonzero(marked)]


def _event_source(history: Sequence[RunEvent]) -> ColumnDataSource | None:
    """Return where a run resumed or its workers changed; None if there is no such place."""
    events = [event for event in history if event.kind in _SHOWN_EVENTS and event.place]
    if not events:
        return None
    return ColumnDataSource({axis: np.array([event.place[axis] for event in events]) for axis in AXES})


def _draw_events(drawn: Any, source: ColumnDataSource, run: int) -> None:
    """Draw vertical lines at the events of a run."""
    glyph = models.VSpan(
        x="step", line_color=style_of(run).colour, line_dash=[2, 4], line_width=1.2, line_alpha=0.8
    )
    _add(drawn, source, glyph, tags=[f"run:{run}", "events"])


def _columns(curve: Curve) -> dict[str, Any]:
    """Return the places of a curve's points, in as few bytes as show them."""
    columns: dict[str, Any] = {name: values.astype(np.float32) for name, values in curve.axes.items()}
    for name in ("step", "samples"):
        values = curve.axes[name]
        is_whole = bool(np.isfinite(values).all()) and (not len(values) or abs(values).max() < _LARGEST_INT)
        columns[name] = values.astype(np.int32) if is_whole else values
    return columns
