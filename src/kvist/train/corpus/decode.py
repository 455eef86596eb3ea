"""Decoders: from an unpacked package to (document name, raw text) pairs, one function a file format.

Formats only (SWORD blocks, R lazy-load databases, WordNet data, factbook JSON, plain and gzipped text, HTML); cleaning
and selection happen later. A file that cannot be decoded raises; nothing is dropped silently.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from kvist.train.corpus.markup import html_to_text, osis_to_text

Documents = Iterator[tuple[str, str]]
Decoder = Callable[[str, bytes], Documents]


def read_bytes(path: Path) -> bytes:
    """The file's content, gunzipped where its name ends in .gz or .dz."""
    if path.suffix in (".gz", ".dz"):
        with gzip.open(path) as stream:
            return stream.read()
    return path.read_bytes()


def _to_text(raw: bytes) -> str:
    """UTF-8 where valid, else Latin-1, which maps every byte."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def decode_text(name: str, raw: bytes) -> Documents:
    """A plain text file is one document."""
    yield name, _to_text(raw)


def decode_html(name: str, raw: bytes) -> Documents:
    """An HTML page is one document."""
    yield name, html_to_text(_to_text(raw))


def read_sword(index: bytes, blocks: bytes) -> list[str]:
    """OSIS markup of a SWORD module's blocks.

    `index` holds little-endian (offset, packed size, size) u32 triples into `blocks`, each block one zlib stream.
    Blocks are read rather than verses because a comment on several verses is referred to once a verse.
    """
    texts = []
    for offset, packed, size in struct.iter_unpack("<III", index):
        if packed:
            data = zlib.decompress(blocks[offset : offset + packed])
            if len(data) != size:
                raise ValueError(f"SWORD block at {offset}: {len(data)} bytes unpacked, the index says {size}")
            texts.append(data.decode("utf-8", "replace"))
    return texts


def _decode_sword(root: Path) -> Documents:
    for index in sorted(root.rglob("*.[bc]zs")):
        blocks = index.with_suffix(index.suffix[:-1] + "z").read_bytes()
        for number, markup in enumerate(read_sword(index.read_bytes(), blocks)):
            yield f"{index.stem}-{number:03d}", osis_to_text(markup)


def read_rdb(data: bytes) -> list[bytes]:
    """Records of an R lazy-load database: u32 big-endian length, then zlib, or 'Z' + xz, or '2' + bzip2."""
    records, at = [], 0
    while at + 4 < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        kind, body = data[at + 4 : at + 5], data[at + 5 :]
        if kind == b"Z":
            unpacker = lzma.LZMADecompressor()
            records.append(unpacker.decompress(body))
            at = len(data) - len(unpacker.unused_data)
        elif kind == b"2":
            bunzip = bz2.BZ2Decompressor()
            records.append(bunzip.decompress(body))
            at = len(data) - len(bunzip.unused_data)
        else:
            inflate = zlib.decompressobj()
            records.append(inflate.decompress(data[at + 4 :]))
            at = len(data) - len(inflate.unused_data)
        if len(records[-1]) != size:
            raise ValueError(f"R record: {len(records[-1])} bytes unpacked, its head says {size}")
    return records


def read_r_strings(record: bytes) -> list[str]:
    """The strings of a serialised R character vector: a CHARSXP is 00 0x 00 09, a length and its bytes."""
    strings, at = [], 0
    head = re.compile(rb"\x00[\x00-\x0f]\x00\x09")
    while found := head.search(record, at):
        (size,) = struct.unpack_from(">i", record, found.end())
        at = found.end() + 4 + max(size, 0)
        strings.append(record[found.end() + 4 : at].decode("utf-8", "replace") if size >= 0 else "")
    return strings


def unwrap(text: str) -> str:
    """Joins hard-wrapped lines: one line a paragraph, blank lines between."""
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()) + "\n"


def decode_rdb(name: str, raw: bytes) -> Documents:
    """Each long character vector of the database is one work, named by its first line and unwrapped."""
    for record in read_rdb(raw):
        lines = read_r_strings(record)
        if len(lines) > 1000:
            title = re.sub(r"\W+", "-", next(line for line in lines if line.strip())).strip("-").lower()
            yield title, unwrap("\n".join(lines))


def decode_wordnet(name: str, raw: bytes) -> Documents:
    """Synsets as "words: gloss" lines, 400 to a document."""
    entries = []
    for line in raw.decode("ascii").splitlines():
        if line.startswith(" "):
            continue
        head, _, gloss = line.partition(" | ")
        fields = head.split()
        words = [fields[4 + 2 * i].replace("_", " ") for i in range(int(fields[3], 16))]
        words = [re.sub(r"\((a|p|ip)\)$", "", word) for word in words]
        entries.append(f"{', '.join(words)}: {gloss.strip()}\n")
    for start in range(0, len(entries), 400):
        yield f"{name}-{start}", "".join(entries[start : start + 400])


def _flatten(node: dict[str, object], depth: int) -> Iterator[str]:
    for key, value in node.items():
        if not isinstance(value, dict):
            yield f"{value}\n" if key == "text" else f"{key}: {value}\n"
        elif set(value) == {"text"}:
            yield f"{key}: {value['text']}\n"
        else:
            yield f"\n{key}\n" if depth < 2 else f"{key}:\n"
            yield from _flatten(value, depth + 1)


def decode_factbook(name: str, raw: bytes) -> Documents:
    """One country profile as headed "field: text" lines."""
    profile = json.loads(raw)
    try:
        country = profile["Government"]["Country name"]["conventional short form"]["text"]
    except KeyError:
        country = ""
    text = f"{country}\n" + "".join(_flatten(profile, 0))
    yield name, re.sub(r"<[^>]+>|\+{2,}", "", text)


def decode_dictd(name: str, raw: bytes) -> Documents:
    """A dictd dictionary as one document, its "00-database" entries dropped."""
    text = _to_text(raw)
    headings = list(re.finditer(r"^00-?database\S*\n(?:[ \t]+.*\n|http.*\n)*", text, re.M))
    yield name, text[headings[-1].end() :] if headings else text


DECODERS: dict[str, Decoder] = {
    "text": decode_text,
    "html": decode_html,
    "rdb": decode_rdb,
    "wordnet": decode_wordnet,
    "factbook": decode_factbook,
    "dictd": decode_dictd,
}


def decode_tree(root: Path, decoder: str, include: str, exclude: str) -> Documents:
    """All documents of an unpacked package, in the order of their paths.

    `include` and `exclude` are regular expressions searched in the relative path. Raises ValueError where nothing fits.
    """
    if decoder == "sword":
        yield from _decode_sword(root)
        return
    found = False
    for path in sorted(root.rglob("*")):
        name = "/" + path.relative_to(root).as_posix()
        if not re.search(include, name) or (exclude and re.search(exclude, name)) or not path.is_file():
            continue
        if path.is_symlink():
            continue
        found = True
        yield from DECODERS[decoder](name, read_bytes(path))
    if not found:
        raise ValueError(f"no file under {root} matches {include!r} without {exclude!r}: did the package change?")
