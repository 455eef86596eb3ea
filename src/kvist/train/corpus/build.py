"""Builds the cleaned, de-duplicated, split corpus: text per tier and split as JSON lines, and the manifest.

Owns the order of the steps and the manifest's form; formats, cleaning and comparison live in their own files.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from multiprocessing import Pool
from pathlib import Path

from kvist.train.corpus.clean import normalise, rejection, strip_gutenberg
from kvist.train.corpus.decode import decode_tree
from kvist.train.corpus.dedup import MAX_SHINGLE_SHARE, HeldOutGuard, NearDuplicates
from kvist.train.corpus.fetch import root_of
from kvist.train.corpus.sources import SOURCES, TIERS, Source

SPLITS = ("train", "heldout")


@dataclass
class SourceReport:
    """What became of one source: the manifest's entry."""

    archive: str = ""
    decoded_documents: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    documents: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    text_sha256: str = ""


@dataclass(frozen=True)
class Document:
    """One cleaned text with the source and the split it belongs to."""

    source: str
    name: str
    split: str
    text: str


def read_source(source: Source, raw: Path) -> tuple[list[Document], SourceReport]:
    """Decodes and cleans one source; documents that fail a gate are counted by reason, none is silently lost."""
    root, archive = root_of(source, raw)
    report = SourceReport(archive=archive)
    documents, digest = [], sha256()
    for name, rough in decode_tree(root, source.decoder, source.include, source.exclude):
        report.decoded_documents += 1
        text = normalise(strip_gutenberg(rough) if source.tier == "prose" else rough)
        if reason := rejection(text, source.tier):
            report.dropped[reason] += 1
            continue
        digest.update(text.encode())
        split = "heldout" if source.held_out and re.search(source.held_out, name) else "train"
        documents.append(Document(source.name, name, split, text))
    report.text_sha256 = digest.hexdigest()
    return documents, report


def _read_one(job: tuple[Source, Path]) -> tuple[list[Document], SourceReport]:
    return read_source(*job)


def deduplicate(documents: list[Document], guard: HeldOutGuard, reports: dict[str, SourceReport]) -> list[Document]:
    """Drops near-duplicates and training documents that quote a held-out work; held-out documents come first."""
    near, kept = NearDuplicates(), []
    for document in sorted(documents, key=lambda d: d.split != "heldout"):
        report = reports[document.source]
        if document.split == "train" and guard.overlap(document.text) > MAX_SHINGLE_SHARE:
            report.dropped["overlaps a held-out work"] += 1
        elif not near.admit(document.text):
            report.dropped["near-duplicate"] += 1
        else:
            kept.append(document)
            report.documents[document.split] += 1
            report.bytes[document.split] += len(document.text.encode())
    return kept


def text_path(out: Path, tier: str, split: str) -> Path:
    """Where the documents of a tier and split lie, one JSON object a line."""
    return out / "text" / f"{tier}.{split}.jsonl"


def read_documents(out: Path, tier: str, split: str) -> Iterator[Document]:
    """The built documents of a tier and split, in their fixed order."""
    path = text_path(out, tier, split)
    if not path.is_file():
        raise ValueError(f"{path} does not exist: run `python -m kvist.train.corpus build --out {out}` first")
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield Document(row["source"], row["name"], split, row["text"])


def _write(out: Path, tier: str, documents: list[Document]) -> None:
    for split in SPLITS:
        rows = [d for d in documents if d.split == split]
        rows.sort(key=lambda d: sha256(f"{d.source}{d.name}".encode()).digest())
        path = text_path(out, tier, split)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as stream:
            for row in rows:
                entry = {"source": row.source, "name": row.name, "text": row.text}
                stream.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _manifest_entry(source: Source, report: SourceReport) -> dict[str, object]:
    return {
        "tier": source.tier,
        "package": f"{source.registry}:{source.package}",
        "archive": report.archive,
        "licence": source.licence,
        "about": source.about,
        "decoded_documents": report.decoded_documents,
        "documents": dict(report.documents),
        "bytes": dict(report.bytes),
        "dropped": dict(report.dropped),
        "text_sha256": report.text_sha256,
    }


def build(out: Path, workers: int = 2) -> dict[str, object]:
    """Downloads, decodes, cleans, splits and writes everything under `out`; returns the manifest it also writes.

    Documents of a tier are stored in the order of a hash of their names, so that any prefix is a fair sample.
    """
    raw = out / "raw"
    for number, source in enumerate(SOURCES, 1):
        print(f"{number} of {len(SOURCES)}: {source.package}", file=sys.stderr, flush=True)
        root_of(source, raw)
    print("decoding, cleaning, comparing: some minutes", file=sys.stderr, flush=True)
    with Pool(workers) as pool:
        results = pool.map(_read_one, [(source, raw) for source in SOURCES], chunksize=1)
    reports = {source.name: report for source, (_, report) in zip(SOURCES, results, strict=True)}
    by_tier: dict[str, list[Document]] = {tier: [] for tier in TIERS}
    for source, (documents, _) in zip(SOURCES, results, strict=True):
        by_tier[source.tier].extend(documents)
    held_out = [d.text for rows in by_tier.values() for d in rows if d.split == "heldout"]
    guard = HeldOutGuard(held_out)
    for tier in TIERS:
        _write(out, tier, deduplicate(by_tier.pop(tier), guard, reports))
    sources = {source.name: _manifest_entry(source, reports[source.name]) for source in SOURCES}
    totals = {
        tier: {split: sum(reports[s.name].bytes[split] for s in SOURCES if s.tier == tier) for split in SPLITS} for tier in TIERS
    }
    manifest: dict[str, object] = {"bytes": totals, "sources": sources}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest
