"""The report of `inspect`, as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlreplay.cli._inspection import Inspection, printable

_KIND_TEXT = {
    "broken_json": "broken lines",
    "unknown_producer": "payloads of unknown shape",
    "missing_mask": "responses without a mask",
    "token_outside_support": "responses with a sampled token outside its support",
    "invalid": "responses refused for another reason",
    "unreadable": "unreadable files",
    "empty": "files or lines without a response",
}


def print_report(inspection: Inspection, console: Console) -> None:
    """Print the numbers, what is wrong, and where it was first seen."""
    report = inspection.to_dict()
    console.print(_numbers(report))
    if inspection.is_sound:
        console.print("[green]nothing wrong[/green]")
        return
    console.print(_counts(report["findings"]["by_kind"]))
    console.print(_places(report["findings"]))


def _numbers(report: dict[str, Any]) -> Table:
    table = Table("", "", show_header=False, title=_plural(len(report["files"]), "file"))
    producers = ", ".join(f"{name} {count:,}" for name, count in report["producers"].items())
    responses = report["responses"]
    read = f"{responses['read']:,} read" + (f" ({producers})" if producers else "")
    table.add_row("responses", read + (f", {responses['bad']:,} bad" if responses["bad"] else ""))
    if responses["unfinished"]:
        table.add_row(
            "  unfinished", f"{responses['unfinished']:,} (finish_reason is null: chunks?)"
        )
    _add_rows(table, report["rows"])
    _add_sizes(table, report["support_size"])
    entropy = report["support_entropy"]
    text = f"mean {entropy['mean']:.3f}, max {entropy['max']:.3f} nats" if entropy["rows"] else ""
    table.add_row("support entropy", _known(text, entropy["rows"], "no log-prob for each id"))
    _add_mass(table, report["kept_mass"])
    values = report["rollout_log_probs"]
    text = f"{values['min']:.4g} to {values['max']:.4g}" if values["rows"] else ""
    if text:
        text += f", mean {values['mean']:.4g}"
    table.add_row("rollout log-probs", _known(text, values["rows"], "none over the supports"))
    return table


def _add_rows(table: Table, rows: dict[str, Any]) -> None:
    table.add_row("rows (tokens)", f"{rows['total']:,}")
    if rows["not_in_loss"]:
        excluded = _share(rows["not_in_loss"], rows["total"])
        table.add_row("  not in the loss", f"{excluded}, left out below")
    table.add_row("  forced (one id)", _share(rows["forced"], rows["in_loss"]))
    table.add_row("  unrestricted", _share(rows["unrestricted"], rows["in_loss"]))


def _add_sizes(table: Table, sizes: dict[str, Any]) -> None:
    table.add_section()
    if sizes["mean"] is None:
        table.add_row("support size", "no restricted row")
    else:
        table.add_row("support size, mean", f"{sizes['mean']:,.1f} ({sizes['ids']:,} ids)")
        listed = ", ".join(f"p{p} {size:,}" for p, size in sizes["percentiles"].items())
        table.add_row("  percentiles", listed)
    table.add_section()


def _add_mass(table: Table, mass: dict[str, Any]) -> None:
    text = f"mean {mass['mean']:.5f}, min {mass['min']:.5f}" if mass["rows"] else ""
    table.add_row("kept mass", _known(text, mass["rows"], mass["why_unknown"] or "no row"))
    if mass["rows_above_one"]:
        table.add_row("  above 1", f"it would be in {_plural(mass['rows_above_one'], 'row')}")
    if mass["rows_rounded_to_one"]:
        rounded = _plural(mass["rows_rounded_to_one"], "row")
        table.add_row("  taken as 1", f"{rounded}, above it by rounding")


def _known(text: str, rows: int, why_not: str) -> str:
    return f"{text} ({_plural(rows, 'row')})" if rows else f"not known: {why_not}"


def _share(count: int, total: int) -> str:
    return f"{count:,} ({count / total:.1%})" if total else "0"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _counts(by_kind: dict[str, int]) -> Table:
    table = Table("wrong", "count", title="findings", title_style="bold red")
    table.columns[1].justify = "right"
    for kind, count in by_kind.items():
        if count:
            table.add_row(_KIND_TEXT[kind], f"{count:,}")
    return table


def _places(findings: dict[str, Any]) -> Table:
    hidden = findings["total"] - len(findings["first"])
    title = f"the first of them ({hidden:,} more)" if hidden else "where"
    table = Table("file", "line", "response", "row", "what", title=title, show_lines=True)
    table.columns[0].overflow = "fold"
    for first in findings["first"]:
        place = ("-" if first[k] is None else str(first[k]) for k in ("line", "response", "row"))
        table.add_row(escape(printable(first["file"])), *place, escape(first["message"]))
    return table
