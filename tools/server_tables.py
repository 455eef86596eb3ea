"""Writes the tables of settings and errors in docs/server.md anew from the code.

Owns the markers between which they stand. `python tools/server_tables.py` from the repository's root.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvist.server.errors import errors_table
from kvist.server.settings import settings_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "server.md"


def main() -> None:
    """Replace what stands between each pair of markers."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in (("settings", settings_table()), ("errors", errors_table())):
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)"
        text, count = re.subn(pattern, lambda found, table=table: found[1] + table + found[2], text, flags=re.DOTALL)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"{PAGE} has {count} pairs of markers for {name}; it needs one")
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
