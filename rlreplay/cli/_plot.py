"""The picture of `inspect --plot`: sizes of the supports, sizes along the response, entropies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rlreplay.cli._inspection import ENTROPY_BIN, Inspection
from rlreplay.errors import ReplayError

_INK, _BAND = "#1f4e79", "#9dbfdd"


def draw(inspection: Inspection, path: Path) -> None:
    """Write the three panels to `path`, in the format of its suffix.

    Raises:
        ReplayError: no response token, a suffix that matplotlib does not know, or a path that
            cannot be written.
    """
    if not inspection.supports.rows:
        raise _no_plot("there is nothing to draw", "a response token in the loss", "none")
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    sizes, along, entropy = figure.subplots(1, 3)
    _draw_sizes(sizes, inspection)
    _draw_along(along, inspection)
    _draw_entropy(entropy, inspection)
    for axes in (sizes, along, entropy):
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        expected = "a path for a png, pdf or svg file"
        raise _no_plot("the plot cannot be written", expected, f"{path}: {error}") from None


def _no_plot(problem: str, expected: str, got: str) -> ReplayError:
    return ReplayError(problem, expected=expected, got=got, consequence="there is no plot")


def _draw_sizes(axes: Axes, inspection: Inspection) -> None:
    """A bar for each octave of sizes: its share of the restricted rows."""
    axes.set_title("support size")
    counts = inspection.supports.size_counts[1:]
    if not counts.any():
        _say(axes, "no restricted row")
        return
    octaves = np.floor(np.log2(np.arange(1, counts.size + 1))).astype(np.int64)
    shares = np.bincount(octaves, weights=counts) / counts.sum()
    axes.bar(np.arange(shares.size), shares, width=0.85, color=_INK)
    for at in np.flatnonzero(shares):
        label = f"{shares[at]:.1%}" if shares[at] >= 0.0005 else "<0.1%"
        axes.annotate(label, (at, shares[at]), xytext=(0, 2), textcoords="offset points",
                      ha="center", fontsize=7)  # fmt: skip
    axes.set_xticks(np.arange(shares.size), [_octave(k) for k in range(shares.size)])
    axes.tick_params(axis="x", labelsize=7, rotation=45 if shares.size > 6 else 0)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("ids in the support")
    axes.set_ylabel("share of restricted rows")


def _octave(k: int) -> str:
    return "1" if k == 0 else f"{2**k:,}-{2 ** (k + 1) - 1:,}"


def _draw_along(axes: Axes, inspection: Inspection) -> None:
    axes.set_title("support size along the response")
    profile = inspection.profile
    at, median = profile.quantile(0.5)
    if not at.size:
        _say(axes, "no restricted row")
        return
    low, high = profile.quantile(0.1)[1], profile.quantile(0.9)[1]
    axes.fill_between(at, low, high, color=_BAND, linewidth=0, label="10 % to 90 %")
    axes.plot(at, median, color=_INK, linewidth=1.5, marker="." if at.size < 3 else "",
              label="median")  # fmt: skip
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda size, _: f"{size:,.0f}")
    axes.set_ylim(bottom=0.9, top=max(4.0, 1.5 * float(high.max())))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(lambda position, _: f"{position:,.0f}")
    axes.set_xlim(left=0)
    axes.set_xlabel("response token")
    axes.set_ylabel("ids in the support")
    axes.legend(frameon=False, fontsize=8, loc="best")


def _draw_entropy(axes: Axes, inspection: Inspection) -> None:
    axes.set_title("entropy of the support")
    counts = inspection.entropy_counts
    if not counts.any():
        _say(axes, "not known: no log-prob\nfor each support id")
        return
    last = int(np.flatnonzero(counts)[-1]) + 1
    edges = np.arange(last + 1) * ENTROPY_BIN
    axes.stairs(counts[:last], edges, fill=True, color=_INK)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("nats")
    axes.set_ylabel(f"rows (of {inspection.supports.entropy_rows:,})")


def _say(axes: Axes, text: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color="0.4")
