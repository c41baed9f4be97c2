"""The commands, as typer reads them."""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from rlreplay.cli._files import COLUMNAR, Advance, is_columnar, read_records
from rlreplay.cli._inspection import Inspection, printable
from rlreplay.cli._records import Engine, Problem, ReadOptions, Record
from rlreplay.cli._report import print_report
from rlreplay.engines import LogprobsMode, LogProbsOver, OnMissingMask, OnUncommittedToken
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


def _read_options(
    engine: Annotated[
        Engine | None,
        typer.Option(help="The producer of the payloads; told by their shape if absent."),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Refuse ids that are not below it.")
    ] = None,
    on_missing_mask: Annotated[
        OnMissingMask | None,
        typer.Option(
            help="How a response without a mask is taken: refused (raise, if absent), or sampled "
            "from all ids."
        ),
    ] = None,
    on_uncommitted_token: Annotated[
        OnUncommittedToken | None,
        typer.Option(
            help="SGLang: what becomes of an aborted response's token without a support (raise, "
            "if absent)."
        ),
    ] = None,
    logprobs_mode: Annotated[
        LogprobsMode | None,
        typer.Option(help="vLLM: the server's --logprobs-mode (processed_logprobs, if absent)."),
    ] = None,
    log_probs_over: Annotated[
        LogProbsOver | None,
        typer.Option(
            help="slime: what output_token_logprobs are normalised over (vocabulary, if absent)."
        ),
    ] = None,
) -> ReadOptions:
    """The options of every command that reads files."""
    return ReadOptions(
        engine,
        vocab_size,
        on_missing_mask,
        on_uncommitted_token,
        logprobs_mode,
        log_probs_over,
    )


def _reading(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the parameters of `_read_options` in place of its `options`."""
    shared = signature(_read_options, eval_str=True).parameters
    own = signature(command, eval_str=True)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = _read_options(**{name: given.pop(name) for name in shared})
        command(options=options, **given)

    kept = [each for name, each in own.parameters.items() if name != "options"]
    run.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*kept, *shared.values()]
    )
    return run


@app.command()
@_reading
def inspect(
    files: Annotated[list[Path], _File],
    options: ReadOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw the supports (png, pdf, svg).")
    ] = None,
    max_findings: Annotated[int, typer.Option(min=0, help="How many bad places to list.")] = 20,
) -> None:
    """Say what FILES hold: JSONL of engine payloads, or Arrow and Parquet files of rollouts.

    Exits with 1 where something is wrong. Files are streamed: their size does not matter, but a
    line of JSONL must not exceed 64 MiB. Each response in a line is taken for a whole one; those
    whose finish_reason is null, such as chunks of a stream, are counted as unfinished. Arrow and
    Parquet files take --vocab-size, and no option that says how payloads are read.
    """
    _check_sources(files, options, "FILES")
    if plot is not None:
        _check_plot(plot)
    inspection = Inspection(max_findings)
    with _extras(), _progress(files) as advance:
        for path in files:
            inspection.files.append(str(path))
            for record in read_records(path, options, advance):
                inspection.add(record)
    with _output():
        if as_json:
            print(json.dumps(inspection.to_dict(), indent=2, allow_nan=False))
        else:
            print_report(inspection, _Console())
    drawn = plot is None or _draw(inspection, plot)
    raise typer.Exit(1 if not inspection.is_sound else 0 if drawn else 2)


@app.command()
@_reading
def convert(
    source: Annotated[Path, _File],
    target: Annotated[Path, typer.Argument(dir_okay=False, help="An .arrow or .parquet file.")],
    options: ReadOptions,
    overwrite: Annotated[bool, typer.Option(help="Replace a TARGET that is there.")] = False,
) -> None:
    """Rewrite SOURCE (JSONL, Arrow, Parquet) as TARGET (Arrow, Parquet).

    The first response that is bad, or that does not say its prompt, ends it with 1: TARGET is
    complete, or untouched. A line of JSONL must not exceed 64 MiB. Each response in a line becomes
    a rollout, and those whose finish_reason is null are counted in what is printed. Arrow and
    Parquet files take --vocab-size, and no option that says how payloads are read.
    """
    _check_sources([source], options, "SOURCE")
    _check_target(source, target, overwrite)
    with _extras():
        from rlreplay.storage import write_rollouts
    counts: Counter[str] = Counter()
    try:
        with _progress([source]) as advance:
            records = read_records(source, options.with_prompts(), advance)
            written = write_rollouts(target, _rollouts_of(records, counts))
    except (_Refused, ReplayError, OSError) as error:
        typer.echo(printable(f"rlreplay: {error}; {target} was not written"), err=True)
        raise typer.Exit(2 if isinstance(error, OSError) else 1) from None
    with _output():
        text = f"{written:,} rollout{'' if written == 1 else 's'} in {target}"
        if counts["unfinished"]:
            text += f", {counts['unfinished']:,} unfinished (finish_reason is null: chunks?)"
        print(printable(text))


class _Refused(Exception):
    """A record that cannot be converted, with its place."""


def _rollouts_of(records: Iterable[Record], counts: Counter[str]) -> Iterator[Rollout]:
    """The rollouts, up to a problem; `counts` is told how many are `unfinished`."""
    for record in records:
        if isinstance(record, Problem):
            raise _Refused(f"{record.place}: {record.error}")
        counts["unfinished"] += record.unfinished
        yield record.rollout


def _draw(inspection: Inspection, path: Path) -> bool:
    """Was there a plot to draw, and could it be written?"""
    from rlreplay.cli._plot import draw

    try:
        draw(inspection, path)
    except ReplayError as error:
        typer.echo(printable(f"rlreplay: {error}"), err=True)
        return False
    return True


# Checks of the call, before anything is read


def _check_sources(files: list[Path], options: ReadOptions, hint: str) -> None:
    """Refuse a file that is given twice, and options on payloads for a file that holds none."""
    seen: dict[tuple[int, int], Path] = {}
    for path in files:
        status = path.stat()
        first = seen.setdefault((status.st_dev, status.st_ino), path)
        if first is not path:
            raise typer.BadParameter(printable(f"{path} is {first} again"), param_hint=hint)
    given = ", ".join("--" + name.replace("_", "-") for name in options.of_payloads)
    for path in files if given else ():
        with suppress(OSError):  # a file that cannot be read is a finding
            if is_columnar(path):
                message = f"{path} holds rollouts, and no payloads to read that way"
                raise typer.BadParameter(printable(message), param_hint=given)


def _check_plot(path: Path) -> None:
    if path.suffix not in _PLOT_SUFFIXES:
        expected = ", ".join(_PLOT_SUFFIXES)
        message = printable(f"{path.name} ends in none of {expected}")
        raise typer.BadParameter(message, param_hint="--plot")
    _check_writable(path, "--plot")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        message = "it needs matplotlib: pip install 'rlreplay[cli]'"
        raise typer.BadParameter(message, param_hint="--plot") from None


def _check_target(source: Path, target: Path, overwrite: bool) -> None:
    if target.suffix not in COLUMNAR:
        message = printable(f"{target.name} ends in neither {' nor '.join(COLUMNAR)}")
        raise typer.BadParameter(message, param_hint="TARGET")
    if target.exists() and os.path.samefile(source, target):
        raise typer.BadParameter("it is SOURCE itself", param_hint="TARGET")
    if target.exists() and not overwrite:
        raise typer.BadParameter("it is there already (--overwrite)", param_hint="TARGET")
    _check_writable(target, "TARGET")


def _check_writable(path: Path, hint: str) -> None:
    """Try to write there, without touching what is there."""
    real = Path(os.path.realpath(path))
    if not real.parent.is_dir():
        message = printable(f"{path.parent} is no directory")
        raise typer.BadParameter(message, param_hint=hint)
    try:
        if os.path.lexists(real):
            real.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=real.parent).close()
    except OSError as error:
        message = printable(f"{path} cannot be written: {error.strerror}")
        raise typer.BadParameter(message, param_hint=hint) from None


# Surroundings


@contextmanager
def _extras() -> Iterator[None]:
    """A library that is not installed is named, with its extra, and ends it with 2."""
    try:
        yield
    except ImportError as error:
        typer.echo(f"rlreplay: {error}", err=True)
        raise typer.Exit(2) from None


class _Console(Console):
    """A console whose closed pipe is left to `_output`; rich would exit."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


@contextmanager
def _output() -> Iterator[None]:
    """Output that cannot be written ends it with 2.

    Where a pipe was closed (`| head`), its reader has seen enough: the exit status stays that of
    the files.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # what is buffered would be written, and fail, once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            typer.echo(f"rlreplay: the report cannot be written: {error.strerror}", err=True)
            raise typer.Exit(2) from None


@contextmanager
def _progress(files: list[Path]) -> Iterator[Advance]:
    """A bar on stderr, on a terminal only; yields what is told of bytes done."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda done: None
        return
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    known = all(path.is_file() for path in files)  # how long a pipe is, nobody knows
    total = sum(path.stat().st_size for path in files) if known else None
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=total)
        yield lambda done: progress.advance(task, done)
