"""The commands, as typer reads them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from rlreplay.cli._inspection import Inspection, printable
from rlreplay.cli._payloads import COLUMNAR, Advance, Engine, ReadOptions, Record, read_records
from rlreplay.cli._report import print_report
from rlreplay.engines._common import OnMissingMask
from rlreplay.engines._vllm_choice import LogprobsMode
from rlreplay.engines.sglang import OnUncommittedToken
from rlreplay.engines.slime import LogProbsOver
from rlreplay.errors import ReplayError
from rlreplay.rollout import Rollout

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look into files of rollouts, and convert them.",
)

_PLOT_SUFFIXES = (".png", ".pdf", ".svg")
_File = typer.Argument(exists=True, dir_okay=False, readable=True)
EngineOption = Annotated[
    Engine | None, typer.Option(help="The producer of the payloads; told by their shape if absent.")
]
VocabOption = Annotated[int | None, typer.Option(min=1, help="Refuse ids that are not below it.")]
MissingMaskOption = Annotated[
    OnMissingMask,
    typer.Option(help="How a response without a mask is taken: refused, or sampled from all ids."),
]
UncommittedOption = Annotated[
    OnUncommittedToken,
    typer.Option(help="SGLang: what becomes of an aborted response's token without a support."),
]
ModeOption = Annotated[LogprobsMode, typer.Option(help="vLLM: the server's --logprobs-mode.")]
OverOption = Annotated[
    LogProbsOver, typer.Option(help="slime: what output_token_logprobs are normalised over.")
]


@app.command()
def inspect(
    files: Annotated[list[Path], _File],
    engine: EngineOption = None,
    vocab_size: VocabOption = None,
    on_missing_mask: MissingMaskOption = "raise",
    on_uncommitted_token: UncommittedOption = "raise",
    logprobs_mode: ModeOption = "processed_logprobs",
    log_probs_over: OverOption = "vocabulary",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw the supports (png, pdf, svg).")
    ] = None,
    max_findings: Annotated[int, typer.Option(min=0, help="How many bad places to list.")] = 20,
) -> None:
    """Say what FILES hold: JSONL of engine payloads, or Arrow and Parquet files of rollouts.

    Exits with 1 where something is wrong. Files are streamed: their size does not matter.
    """
    if plot is not None:
        _check_plot(plot)
    options = ReadOptions(
        engine,
        vocab_size,
        on_missing_mask,
        on_uncommitted_token,
        logprobs_mode,
        log_probs_over,
    )
    inspection = Inspection(max_findings)
    with _extras(), _progress(files) as advance:
        for path in files:
            _inspect_file(path, options, advance, inspection)
    if as_json:
        print(json.dumps(inspection.to_dict(), indent=2, allow_nan=False))
    else:
        print_report(inspection, Console())
    if plot is not None:
        from rlreplay.cli._plot import draw

        try:
            draw(inspection, plot)
        except ReplayError as error:
            typer.echo(f"rlreplay: {error}", err=True)
            raise typer.Exit(2) from None
    raise typer.Exit(0 if inspection.is_sound else 1)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True)],
    target: Annotated[Path, typer.Argument(dir_okay=False, help="An .arrow or .parquet file.")],
    engine: EngineOption = None,
    vocab_size: VocabOption = None,
    on_missing_mask: MissingMaskOption = "raise",
    on_uncommitted_token: UncommittedOption = "raise",
    logprobs_mode: ModeOption = "processed_logprobs",
    log_probs_over: OverOption = "vocabulary",
    overwrite: Annotated[bool, typer.Option(help="Replace a TARGET that is there.")] = False,
) -> None:
    """Rewrite SOURCE (JSONL, Arrow, Parquet) as TARGET (Arrow, Parquet).

    The first response that is bad, or that does not say its prompt, ends it with 1: TARGET is
    complete, or untouched.
    """
    _check_target(source, target, overwrite)
    options = ReadOptions(
        engine,
        vocab_size,
        on_missing_mask,
        on_uncommitted_token,
        logprobs_mode,
        log_probs_over,
        need_prompt=True,
    )
    with _extras():
        from rlreplay.storage import write_rollouts
    try:
        with _progress([source]) as advance:
            records = read_records(source, options, advance)
            count = write_rollouts(target, map(_rollout_of, records))
    except (_Refused, ReplayError, OSError) as error:
        typer.echo(printable(f"rlreplay: {error}; {target} was not written"), err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{count:,} rollouts in {target}")


def _inspect_file(
    path: Path, options: ReadOptions, advance: Advance, inspection: Inspection
) -> None:
    inspection.files.append(str(path))
    empty = True
    for record in read_records(path, options, advance):
        inspection.add(record)
        empty = False
    if empty:
        error = ReplayError(
            "the file holds no response",
            expected="at least one",
            got="none",
            consequence="there is nothing to train on",
        )
        inspection.add(Record(str(path), None, None, error=error, kind="empty"))


class _Refused(Exception):
    """A record that cannot be converted, with its place."""


def _rollout_of(record: Record) -> Rollout:
    if record.rollout is None:
        raise _Refused(f"{record.place}: {record.error}")
    return record.rollout


def _check_plot(path: Path) -> None:
    if not path.resolve().parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is no directory", param_hint="--plot")
    if path.suffix not in _PLOT_SUFFIXES:
        expected = ", ".join(_PLOT_SUFFIXES)
        raise typer.BadParameter(f"{path.name} ends in none of {expected}", param_hint="--plot")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        message = "it needs matplotlib: pip install 'rlreplay[cli]'"
        raise typer.BadParameter(message, param_hint="--plot") from None


def _check_target(source: Path, target: Path, overwrite: bool) -> None:
    if not target.resolve().parent.is_dir():
        raise typer.BadParameter(f"{target.parent} is no directory", param_hint="TARGET")
    if target.suffix not in COLUMNAR:
        expected = " nor ".join(COLUMNAR)
        raise typer.BadParameter(f"{target.name} ends in neither {expected}", param_hint="TARGET")
    if target.exists() and os.path.samefile(source, target):
        raise typer.BadParameter("it is SOURCE itself", param_hint="TARGET")
    if target.exists() and not overwrite:
        raise typer.BadParameter("it is there already (--overwrite)", param_hint="TARGET")


@contextmanager
def _extras() -> Iterator[None]:
    """A library that is not installed is named, with its extra, and ends it with 2."""
    try:
        yield
    except ImportError as error:
        typer.echo(f"rlreplay: {error}", err=True)
        raise typer.Exit(2) from None


@contextmanager
def _progress(files: list[Path]) -> Iterator[Advance]:
    """A bar on stderr, on a terminal only; yields what is told of bytes done."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=sum(path.stat().st_size for path in files))
        yield lambda done: progress.advance(task, done)
