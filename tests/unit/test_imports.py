"""Walks the syntax tree of every file under src/kvist and fails on an import edge that the architecture does not allow.

Owns the table of docs/architecture.md in executable form. Knows nothing of what the modules do; imports none of them,
except in one subprocess that shows that the light packages and the command line start without torch.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "kvist"

_BASE = {"config"}
_MODEL = _BASE | {"quant", "kernels", "model"}
_ENGINE = _MODEL | {"images", "text", "checkpoint", "cache"}

# Who may import whom inside the package. Whoever may import the model may import what the model is made of.
ALLOWED: dict[str, set[str]] = {
    "version": set(),
    "config": set(),
    "quant": _BASE,
    "kernels": _BASE | {"quant"},
    "model": _BASE | {"quant", "kernels"},
    "images": _BASE,
    "text": _BASE,
    "checkpoint": _MODEL | {"text"},
    "cache": _BASE | {"quant", "kernels"},
    "engine": _ENGINE,
    "server": {"engine", "text"},
    "chat": {"engine", "text", "server"},
    "train": _MODEL | {"checkpoint", "text", "images"},
    "conformance": _MODEL | {"checkpoint", "images", "text"},
    "lab": _MODEL | {"checkpoint", "text", "images", "train"},
    "cluster": _ENGINE | {"engine"},
    "plan": _BASE,
    "testing": _BASE | {"quant", "kernels"},
    "cli": _ENGINE | {"engine", "server", "chat", "train", "conformance", "lab", "cluster", "plan", "testing", "version", "cli"},
    "__init__": {"version"},
    "__main__": {"cli"},
}
# Files at the root of the package that stand under another one's rule: sizes of a model, commands.
UNIT_OF_FILE = dict.fromkeys(("presets", "config_json", "inventory", "page_layout"), "config")
UNIT_OF_FILE |= {"cli_bench": "cli", "cli_errors": "cli"}
WITHOUT_TORCH = {"version", "config", "images", "text", "plan", "server", "chat", "cli", "__init__", "__main__"}
CORE_DEPENDENCIES = {"torch", "numpy", "safetensors", "tokenizers", "PIL", "typer", "rich", "xxhash"}
SERVER_DEPENDENCIES = {"fastapi", "pydantic", "pydantic_settings", "starlette", "uvicorn", "prometheus_client"}
FORBIDDEN_NAMES = {"utils", "util", "common", "misc", "helpers"}


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module as written in one file; `lazy` if loading the file does not run it (a function, type checking)."""

    module: str
    line: int
    lazy: bool


def unit_of(path: Path, source: Path = SOURCE) -> str:
    """The row of the table that a file belongs to: its first folder, or its own name at the package's root."""
    first = path.relative_to(source).parts[0].removesuffix(".py")
    return UNIT_OF_FILE.get(first, first)


def imports_of(tree: ast.AST, package: str) -> Iterator[Import]:
    """Every import in a file; relative ones are resolved against `package`, the dotted package that holds the file."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _for_types(child)
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(module=alias.name, line=child.lineno, lazy=lazy)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parts = package.split(".")
                    base = ".".join([*parts[: len(parts) - child.level + 1], *([base] if base else [])])
                # `from kvist import quant` names the module in the alias
                names = [f"{base}.{a.name}" for a in child.names] if base == "kvist" else [base]
                for name in names:
                    yield Import(module=name, line=child.lineno, lazy=lazy)
            else:
                yield from visit(child, inside)

    yield from visit(tree, False)


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and not node.orelse and ast.unparse(node.test) == "TYPE_CHECKING"


def violations(path: Path, source: Path = SOURCE) -> list[str]:
    """Every broken rule of one file, as `file:line: reason`."""
    unit = unit_of(path, source)
    where = path.relative_to(source).as_posix()
    if unit not in ALLOWED:
        return [f"{where}:1: '{unit}' has no row in the table of tests/unit/test_imports.py"]
    package = ".".join(["kvist", *path.relative_to(source).parent.parts])
    found = []
    for item in imports_of(ast.parse(path.read_text(), filename=str(path)), package):
        parts = item.module.split(".")
        if parts[0] == "kvist":
            reason = _own_edge(unit, parts, item)
        else:
            reason = _foreign_edge(unit, path, parts[0], item)
        if reason:
            found.append(f"{where}:{item.line}: {reason}")
    return found


def _own_edge(unit: str, parts: list[str], item: Import) -> str | None:
    target = UNIT_OF_FILE.get(parts[1], parts[1]) if len(parts) > 1 else "__init__"
    if target == "__version__":
        return None
    if target != unit and target not in ALLOWED[unit]:
        return f"{unit} must not import {target} ({item.module})"
    if unit == "cli" and not item.lazy and target not in {"version", "cli"}:
        return f"cli imports {item.module} at the top; move it into the command"
    return None


def _foreign_edge(unit: str, path: Path, top: str, item: Import) -> str | None:
    if top == "torch" and unit in WITHOUT_TORCH:
        return f"{unit} must not import torch"
    if top in sys.stdlib_module_names or top in CORE_DEPENDENCIES or item.lazy:
        return None
    if (top == "triton" and (path.name == "gpu.py" or path.name.endswith("_triton.py"))) or (
        unit == "server" and top in SERVER_DEPENDENCIES
    ):
        return None
    return f"{top} is not a core dependency; import it inside the function that uses it"


def source_files() -> list[Path]:
    """Every Python file of the package."""
    return sorted(SOURCE.rglob("*.py"))


def test_no_forbidden_edges() -> None:
    files = source_files()
    assert files
    found = [line for path in files for line in violations(path)]
    assert not found, "\n".join(found)


def test_no_grab_bag_modules() -> None:
    names = {part.removesuffix(".py") for path in source_files() for part in path.relative_to(SOURCE).parts}
    assert not names & FORBIDDEN_NAMES


def test_every_file_states_what_it_owns() -> None:
    missing = []
    for path in source_files():
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        if not docstring or len(docstring.split()) < 6:
            missing.append(path.relative_to(SOURCE).as_posix())
    assert not missing, f"no docstring at the top of {missing}"


@pytest.mark.parametrize(
    ("place", "code", "reason"),
    [
        ("config.py", "import torch", "must not import torch"),
        ("text/chat.py", "def f():\n    import torch.nn", "must not import torch"),
        ("plan/bytes.py", "from kvist.quant import pack_fp8", "plan must not import quant"),
        ("cache/pool.py", "from kvist import model", "cache must not import model"),
        ("cache/pool.py", "from ..model import block", "cache must not import model"),
        ("model/block.py", "def f():\n    from ..engine import runner", "model must not import engine"),
        ("model/block.py", "if True:\n    import huggingface_hub", "not a core dependency"),
        ("plan/figures.py", "import matplotlib.pyplot as plt", "not a core dependency"),
        ("cache/pool.py", "if TYPE_CHECKING:\n    from kvist.engine import session", "cache must not import engine"),
        ("kernels/moe/cpu.py", "import triton", "not a core dependency"),
        ("cli.py", "from kvist.model import generate", "move it into the command"),
        ("surprise.py", "import os", "no row in the table"),
    ],
)
def test_the_checker_sees_a_planted_edge(tmp_path: Path, place: str, code: str, reason: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    assert reason in "\n".join(violations(path, tmp_path))


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("kernels/moe/gpu.py", "import triton"),
        ("checkpoint/locate.py", "def f():\n    import huggingface_hub"),
        ("model/block.py", "from kvist.kernels import moe\nfrom . import rope\nimport torch"),
        ("presets.py", "from kvist.config import ModelConfig"),
        ("cli.py", "if TYPE_CHECKING:\n    from kvist.config import ModelConfig"),
    ],
)
def test_the_checker_accepts_allowed_edges(tmp_path: Path, place: str, code: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    assert violations(path, tmp_path) == []


def test_light_packages_start_without_torch() -> None:
    present = [n for n in ("config", "presets", "images", "text", "plan", "cli") if _exists(n)]
    imports = "; ".join(f"import kvist.{name}" for name in present)
    code = f"import sys; {imports}; print([m for m in ('torch', 'matplotlib', 'huggingface_hub') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def _exists(name: str) -> bool:
    return (SOURCE / f"{name}.py").exists() or (SOURCE / name / "__init__.py").exists()
