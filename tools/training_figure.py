"""Draws a training run: loss by tier over tokens, with the stages' borders.

Use: `python tools/training_figure.py METRICS.jsonl OUT.png`. Must not know how a run is made.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(metrics: Path, out: Path) -> None:
    """Read the lines that `train` wrote and save a figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for tier in ("prose", "docs", "code", "synthetic"):
        points = [(line["tokens_seen"] / 1e6, line["loss_by_tier"][tier]) for line in lines if tier in line["loss_by_tier"]]
        axes.plot([x for x, _ in points], [y for _, y in points], label=tier, linewidth=1)
    length = lines[0]["length"]
    for line in lines:
        if line["length"] != length:
            length = line["length"]
            axes.axvline(line["tokens_seen"] / 1e6, color="grey", linewidth=0.8, linestyle="--")
            axes.text(line["tokens_seen"] / 1e6, 6.2, f" T={length:,}", fontsize=8)
    axes.set(xlabel="tokens (millions)", ylabel="training loss (nats a token)", ylim=(1, 6.5))
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
