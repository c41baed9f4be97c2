"""The command `rlreplay`: `inspect` says what is in files of rollouts, `convert` rewrites them.

Exit status: 0 where all is well, 1 where something in the files is wrong, 2 where the call is.
"""

from __future__ import annotations

import sys

__all__ = ["main"]

_EXTRA = ("typer", "rich")


def main() -> None:
    """Run the command line; where its libraries are missing, say which extra has them."""
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
    app()
