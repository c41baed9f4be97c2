"""The module map: who imports whom, and what `import rlreplay` must not import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A module imports only from those above it.
TABLE = (
    "errors",
    "sampling_mask",
    "rollout",
    "capture",
    "request_validation",
    "engines",
    "storage",
    "layout",
    "parallel",
    "id_segments",
    "plan",
    "kernels",
    "scores",
    "hidden_scores",
    "log_probs",
    "diagnostics",
    "cli",
)

# The modules of a package do not import each other, but for these (and the `_private` ones).
SHARED_IN_PACKAGE = {"kernels.rows", "kernels.reference", "kernels.softmax"}

OPTIONAL = ("megatron", "triton", "pyarrow", "typer", "rich", "matplotlib")


def read_package() -> dict[str, str]:
    """Source by dotted name without the leading `rlreplay`; "" is its `__init__`."""
    package = ROOT / "rlreplay"
    sources = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        sources[name] = file.read_text(encoding="utf-8")
    return sources


def packages_of(sources: dict[str, str]) -> set[str]:
    return {name.rpartition(".")[0] for name in sources if name} | {""}


def imports_of(module: str, sources: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that a module imports, at any level of nesting.

    `from a import b` names `a.b`, since b may be a module; relative names are made absolute.
    """
    full_name = f"rlreplay.{module}".rstrip(".")
    package = full_name if module in packages_of(sources) else full_name.rpartition(".")[0]
    for node in ast.walk(ast.parse(sources[module])):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            function, argument = ast.unparse(node.func), node.args[0]
            by_name = function.rpartition(".")[2] in ("import_module", "__import__")
            if by_name and isinstance(argument, ast.Constant):
                yield node.lineno, str(argument.value)


def own_modules_of(module: str, sources: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Line and name in `sources` of every rlreplay module that a module imports."""
    for line, name in imports_of(module, sources):
        if name.partition(".")[0] == "rlreplay":
            target = name.partition(".")[2]
            yield line, target if target in sources else target.rpartition(".")[0]


def violations(sources: dict[str, str]) -> list[str]:
    """A line for each module that the table lacks and each import that it forbids."""
    found = []
    for module in filter(None, sources):
        top = module.partition(".")[0]
        if top not in TABLE:
            found.append(f"{module} is not in the table")
            continue
        for line, target in own_modules_of(module, sources):
            if not is_allowed(module, target, packages_of(sources)):
                found.append(f"{module}:{line} imports rlreplay.{target}".rstrip("."))
    return found


def is_allowed(module: str, target: str, packages: set[str]) -> bool:
    top, target_top = module.partition(".")[0], target.partition(".")[0]
    if target_top not in TABLE:
        return False
    if top != target_top:
        return TABLE.index(target_top) < TABLE.index(top)
    is_private = target.rpartition(".")[2].startswith("_")
    return module in packages or is_private or target in SHARED_IN_PACKAGE


def importers_of(library: str, sources: dict[str, str]) -> set[str]:
    return {
        module
        for module in sources
        for _, name in imports_of(module, sources)
        if name.partition(".")[0] == library
    }


def loaded_by(statement: str, libraries: tuple[str, ...]) -> set[str]:
    """Which of the libraries a fresh interpreter has loaded after the statement."""
    code = f"import sys\n{statement}\nprint(*(n for n in {libraries!r} if n in sys.modules))"
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert finished.returncode == 0, finished.stderr
    return set(finished.stdout.split())


def test_modules_import_only_from_those_above_them():
    sources = read_package()

    assert {"", "errors", "sampling_mask", "kernels.reference", "kernels.softmax"} <= set(sources)
    assert violations(sources) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("layout", "from rlreplay.plan import ReplayPlan"),
        ("layout", "import rlreplay.plan"),
        ("layout", "from rlreplay import plan"),
        ("layout", "from .plan import ReplayPlan"),
        ("layout", "from . import plan"),
        ("layout", "def f():\n    import rlreplay.plan as p"),
        ("layout", "import importlib\nimportlib.import_module('rlreplay.plan')"),
        ("layout", "from rlreplay import ReplayPlan"),
        ("layout", "import rlreplay"),
        ("engines.sglang", "from rlreplay.engines.vllm import from_response"),
        ("engines.sglang", "from .vllm import from_response"),
        ("engines.sglang", "from ..layout import RowLayout"),
        ("engines", "from rlreplay.plan import ReplayPlan"),
        ("helpers", ""),
        ("helpers.rows", ""),
    ],
)
def test_forbidden_imports_are_found(module, source):
    allowed = dict.fromkeys(
        ("", "errors", "layout", "plan", "engines", "engines.sglang", "engines.vllm"), ""
    )

    assert violations(allowed) == []
    assert len(violations({**allowed, module: source})) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("", "from rlreplay.cli import app\nfrom .plan import ReplayPlan"),
        ("plan", "from rlreplay.layout import RowLayout\nfrom . import errors"),
        ("engines", "from rlreplay.engines import sglang"),
        ("engines.sglang", "from rlreplay.engines._common import spans\nfrom ..errors import E"),
        ("kernels.torch_scores", "from rlreplay.kernels.rows import chunks"),
        ("plan", "import torch\nfrom numpy import array"),
    ],
)
def test_allowed_imports_are_not_found(module, source):
    others = "errors layout plan engines engines._common engines.sglang kernels kernels.rows cli"
    sources = dict.fromkeys(["", *others.split()], "")

    assert violations({**sources, module: source}) == []


def test_only_parallel_reads_megatron():
    assert importers_of("megatron", read_package()) == {"parallel"}


def test_only_triton_kernels_import_triton():
    importers = importers_of("triton", read_package())

    assert {name for name in importers if not name.startswith("kernels.triton_")} == set()


def test_importers_of_a_library_are_found():
    sources = {
        "a": "def f():\n    from megatron.core import parallel_state",
        "b": "import megatron.core as core",
        "c": "import numpy  # megatron",
        "d": "from rlreplay.megatron import x",
    }

    assert importers_of("megatron", sources) == {"a", "b"}


def test_importing_rlreplay_loads_no_optional_library():
    assert loaded_by("import rlreplay", OPTIONAL) == set()


def test_loaded_libraries_are_found():
    pytest.importorskip("pyarrow")

    assert loaded_by("import rlreplay, pyarrow", OPTIONAL) == {"pyarrow"}
