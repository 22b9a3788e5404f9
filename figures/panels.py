"""Panels, axis labels and the one legend of a figure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.typing import LineStyleType
from numpy.typing import NDArray

from gradscope.figures.style import REFERENCE_COLOUR, Look

LEGEND_LINE = 0.17
"""Inches that one line of the legend takes."""
CHARACTERS_PER_INCH = 17
"""Of the legend's text, at its size."""
KEY_CHARACTERS = 7
"""Room that an entry's line and gaps take."""
MOST_LAYOUTS = 10
SETTLED, STRIP_TOLERANCE = 1e-5, 1e-3
"""Fractions of the figure by which panels may still move: of a pixel, and of the rounding of heights."""
TITLE_CHARACTERS_PER_INCH = 13
TITLE_LINES = 3
"""Longer titles are cut short."""
LOG_MARGIN = 1.3
STRIP = 0.15
"""Inches that stay empty above and below panels of fixed aspect."""
LABEL_CHARACTERS = 22
"""Of a y label in one line beside a panel."""


def panel_grid(
    num_rows: int, num_columns: int, *, width: float, row_height: float, legend_lines: int, **sharing: Any
) -> tuple[Figure, NDArray[Any]]:
    """Returns a figure of exactly `width` inches and its axes, `[num_rows, num_columns]`.

    The height is a multiple of 0.01 inch, so that the PNG has a whole number of pixels.
    """
    height = round(num_rows * row_height + legend_lines * LEGEND_LINE, 2)
    figure = Figure(figsize=(width, height))
    grid = figure.subplots(num_rows, num_columns, squeeze=False, **sharing)
    for axes in grid.flat:
        # Said here, or the number of ticks would follow the settings at the time of drawing.
        axes.tick_params(labelsize=matplotlib.rcParams["xtick.labelsize"])
    return figure, grid


def axis_label(attributes: Mapping[str, Any], fallback: str) -> str:
    """Returns `long_name (units)` of a variable's attributes, capitalized; a pure number has no unit."""
    name = str(attributes.get("long_name") or fallback)
    units = str(attributes.get("units") or "1")
    label = f"{name[:1].upper()}{name[1:]}" + ("" if units == "1" else f" ({units})")
    return textwrap.fill(label, LABEL_CHARACTERS)


def title_row(
    row: NDArray[Any], heading: str, subtitles: Sequence[str] = (), *, num_columns: int | None = None
) -> None:
    """Puts a heading over a row of panels, and a subtitle over each if there are any.

    The first panel carries the heading; the others get as many empty lines, so that all panels align.
    `num_columns` is that of the figure, where the row is only a part of it.
    """
    width = _width(row[0]) * TITLE_CHARACTERS_PER_INCH * row.size / (num_columns or row.size)
    lines = textwrap.wrap(heading, int(width), max_lines=TITLE_LINES, placeholder=" …")
    for place, axes in enumerate(row):
        own = lines if place == 0 else [""] * len(lines)
        axes.set_title("\n".join([*own, *subtitles[place : place + 1]]), loc="left")


def panel_title(axes: Axes, title: str, *, num_columns: int) -> None:
    """Puts a title over a panel, broken so that it does not run into the next one."""
    width = _width(axes) * TITLE_CHARACTERS_PER_INCH / num_columns
    title = textwrap.fill(title, int(width), max_lines=TITLE_LINES, placeholder=" …")
    axes.set_title(title, loc="left")


def log_axis(axes: Axes, values: NDArray[Any]) -> None:
    """Makes the y axis logarithmic over the range of `values`, with plain numbers.

    The numbers are those at 1, 2 and 5 of each decade, over more than two decades those at 1. Bands of a few
    seeds may reach over many decades; they are cut off.
    """
    axes.set_yscale("log")
    known = values[values > 0]
    if known.size:
        low, high = known.min() / LOG_MARGIN, known.max() * LOG_MARGIN
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def step_axis(axes: Axes, *, label: bool) -> None:
    """Puts round training steps on the x axis, and their numbers and a label where there is none below."""
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    if label:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("Training step")


def settle_layout(figure: Figure, *, fixed_aspect: bool = False) -> None:
    """Places the panels for good; those of fixed aspect without the gaps that their aspect leaves.

    A layout moves a little every time it is made until it has settled; a figure must not depend on how often
    it was drawn before.
    """
    if fixed_aspect:
        figure.set_layout_engine("compressed")
        _lay_out_until_settled(figure, STRIP_TOLERANCE)
        _remove_strips(figure)
    _lay_out_until_settled(figure, SETTLED)
    figure.set_layout_engine("none")


def _lay_out_until_settled(figure: Figure, tolerance: float) -> None:
    engine = figure.get_layout_engine()
    assert engine is not None
    before = None
    for _ in range(MOST_LAYOUTS):
        engine.execute(figure)  # without the drawing that usually goes with it
        after = [axes.get_position().bounds for axes in figure.axes]
        if before is not None and np.allclose(before, after, rtol=0, atol=tolerance):
            break
        before = after


def _remove_strips(figure: Figure) -> None:
    """Makes a figure lower by the empty strips above its panels and between them and the legend."""
    boxes = [box for axes in figure.axes if (box := axes.get_tightbbox()) is not None]
    legend_top = max(legend.get_window_extent().y1 for legend in figure.legends)
    above = figure.bbox.y1 - max(box.y1 for box in boxes)
    below = min(box.y0 for box in boxes) - legend_top
    spare = (above + below) / figure.dpi - STRIP
    if spare > 0:
        figure.set_figheight(round(figure.get_figheight() - spare, 2))


def legend_below(figure: Figure, handles: Sequence[Artist], note: str) -> None:
    """Puts one legend under all panels, with a note on what lines, dots and bands are above its entries."""
    width = figure.get_figwidth()
    # A number stays with its per cent sign.
    lines = textwrap.fill(note.replace(" %", "\u00a0%"), int(width * CHARACTERS_PER_INCH))
    legend = figure.legend(
        handles=list(handles),
        loc="outside lower center",
        ncols=_columns(handles, width),
        title=lines,
        alignment="center",
    )
    legend.get_title().set_multialignment("center")


def role_handles(looks: Mapping[str, Look]) -> list[Artist]:
    """Returns one legend entry a role."""
    return [Line2D([], [], color=look.colour, marker=look.marker, label=role) for role, look in looks.items()]


def reference_handle(label: str, dashes: LineStyleType) -> Artist:
    """Returns the legend entry of a computed line."""
    return Line2D([], [], color=REFERENCE_COLOUR, linestyle=dashes, linewidth=1.0, label=label)


def _width(axes: Axes) -> float:
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure.get_figwidth()


def _columns(handles: Sequence[Artist], width: float) -> int:
    """Returns how many entries fit side by side: all of them, or as many as the longest allows."""
    lengths = [len(str(handle.get_label())) + KEY_CHARACTERS for handle in handles]
    room = int(width * CHARACTERS_PER_INCH)
    if sum(lengths) <= room:
        return max(1, len(handles))
    return max(1, room // max(lengths))
