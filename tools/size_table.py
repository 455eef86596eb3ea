"""Prints the size of every Python file and its longest function, and fails where one is over the limit.

Limits: 500 lines a file, 60 lines a function, 120 in `kernels/`. Knows only the syntax tree, not the package.
"""

from __future__ import annotations

import argparse
import ast
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src/kvist", "benchmarks", "tools", "tests")
FILE_LIMIT = 500
FUNCTION_LIMIT = 60
KERNEL_FUNCTION_LIMIT = 120


@dataclass(frozen=True, kw_only=True)
class FileSize:
    """Line counts of one file; `longest` names the function with most lines."""

    path: str
    lines: int
    functions: int
    longest: str
    longest_lines: int
    over: tuple[str, ...]


def measure(path: Path, root: Path = ROOT) -> FileSize:
    """Count one file's lines and functions. A function runs from `def` to its last line, docstring included."""
    text = path.read_text()
    name = path.relative_to(root).as_posix()
    limit = KERNEL_FUNCTION_LIMIT if "kernels" in path.relative_to(root).parts else FUNCTION_LIMIT
    lengths = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, node.name, node.lineno)
        for node in ast.walk(ast.parse(text, filename=name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lines = text.count("\n")
    over = [f"{name}:{line}: {func} has {n} lines, limit {limit}" for n, func, line in sorted(lengths) if n > limit]
    if lines > FILE_LIMIT:
        over.insert(0, f"{name}: {lines} lines, limit {FILE_LIMIT}")
    n, func, _ = max(lengths, default=(0, "-", 0))
    return FileSize(path=name, lines=lines, functions=len(lengths), longest=func, longest_lines=n, over=tuple(over))


def main(argv: list[str] | None = None) -> int:
    """Print one line a package folder (every file with --files) and every violation; 1 if there is any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="one line a file instead of one a folder")
    arguments = parser.parse_args(argv)
    sizes = [measure(path) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    groups: dict[str, list[FileSize]] = {}
    for size in sizes:
        parts = Path(size.path).parts
        depth = 3 if parts[0] == "src" else 2
        folder = "/".join(parts[: min(depth, len(parts) - 1)])
        groups.setdefault(size.path if arguments.files else folder, []).append(size)
    print(f"{'place':<36}{'files':>6}{'lines':>8}{'longest file':>14}  longest function")
    for name, members in groups.items():
        worst = max(members, key=lambda s: s.longest_lines)
        total = sum(s.lines for s in members)
        longest = max(s.lines for s in members)
        print(f"{name:<36}{len(members):>6}{total:>8}{longest:>14}  {worst.longest} ({worst.longest_lines})")
    print(f"{'all':<36}{len(sizes):>6}{sum(s.lines for s in sizes):>8}")
    over = [line for size in sizes for line in size.over]
    for line in over:
        print(line, file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
