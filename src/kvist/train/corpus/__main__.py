"""Command line of the corpus: build, tokenizer, tokenise, pack, unpack, baseline, excerpt, card.

Thin: every step is one function of another file, imported only when its step runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvist.train.corpus", description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    for step, what in {
        "build": "download, decode, clean, split: OUT/text, OUT/manifest.json",
        "tokenizer": "train the BPE on OUT/text: --tokenizer FILE",
        "tokenise": "OUT/text to OUT/tokens/*.u16 with --tokenizer FILE",
        "pack": "OUT/tokens to --parts DIR",
        "unpack": "--parts DIR back to OUT/tokens (numpy only)",
        "baseline": "xz bits per byte of the held-out text primed with training text: OUT/xz_baseline.json",
        "excerpt": "the shipped chapters of the held-out novel: --excerpt FILE",
        "card": "write the data card: --card FILE",
    }.items():
        sub = steps.add_parser(step, help=what)
        sub.add_argument("--out", type=Path, default=Path("data"))
        sub.add_argument("--tokenizer", type=Path, default=Path("models/nano/tokenizer.json"))
        sub.add_argument("--parts", type=Path, default=Path(".carry"))
        sub.add_argument("--card", type=Path, default=Path("models/nano/data-card.md"))
        sub.add_argument("--excerpt", type=Path, default=Path("src/kvist/assets/persuasion.txt"))
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one step; a mistake of the user's or a file's is one line and status 2."""
    try:
        _run(_parser().parse_args(argv))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _run(arguments: argparse.Namespace) -> None:
    """One step; imports only what it needs."""
    if arguments.step == "build":
        from kvist.train.corpus.build import build

        print(json.dumps(build(arguments.out)["bytes"], indent=1))
    elif arguments.step == "tokenizer":
        from kvist.train.corpus.bpe import train_tokenizer

        print(json.dumps(train_tokenizer(arguments.out, arguments.tokenizer), indent=1))
    elif arguments.step == "tokenise":
        from kvist.train.corpus.tokens import tokenise

        print(json.dumps(tokenise(arguments.out, arguments.tokenizer), indent=1))
    elif arguments.step == "pack":
        from kvist.train.corpus.parts import pack

        print(json.dumps(pack(arguments.out / "tokens", arguments.parts), indent=1))
    elif arguments.step == "unpack":
        from kvist.train.corpus.parts import unpack

        print(json.dumps(unpack(arguments.parts, arguments.out / "tokens"), indent=1))
    elif arguments.step == "baseline":
        from kvist.train.corpus.xz_baseline import measure

        print(json.dumps(measure(arguments.out), indent=1))
    elif arguments.step == "excerpt":
        from kvist.train.corpus.excerpt import write_excerpt

        print(write_excerpt(arguments.out, arguments.excerpt))
    else:
        from kvist.train.corpus.card import write_card

        write_card(arguments.out, arguments.card)


if __name__ == "__main__":
    sys.exit(main())
