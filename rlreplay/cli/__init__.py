"""The command `rlreplay`: `inspect` says what is in files of rollouts, `convert` rewrites them.

Exit status: 0 where all is well, 1 where something in the files is wrong, 2 where the call is or
its output cannot be written, 130 where it was interrupted. An interrupt in the first second, while
Python loads `rlreplay` and torch and none of this runs yet, ends it as Python does: with a
traceback, by the signal.
"""

from __future__ import annotations

import io
import sys

__all__ = ["main"]

_EXTRA = ("typer", "rich")
_INTERRUPTED = 130


def main() -> None:
    """Run the command line; where its libraries are missing, say which extra has them."""
    try:
        _run()
    except KeyboardInterrupt:  # while the libraries are being loaded
        raise SystemExit(_INTERRUPTED) from None


def _run() -> None:
    try:
        from rlreplay.cli._app import app
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _EXTRA:
            raise
        print(
            f"rlreplay: the command line needs {library}: pip install 'rlreplay[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal cannot write is escaped
            stream.reconfigure(errors="backslashreplace")
    app()
