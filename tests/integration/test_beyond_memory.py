"""A checkpoint of the released format, several times larger than the memory its process may take, gives the same tokens.

The process runs under RLIMIT_DATA, so that "may" is the kernel's word: the resident model fails there, the banked one runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import beyond_memory

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, dtype: str, budget: int, allowance: int, prompt: int) -> dict[str, object]:
    command = [sys.executable, "-m", "tests.integration.beyond_memory", folder, dtype, budget, allowance, prompt]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KVIST_THREADS": "1"}
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=1500, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    answer: dict[str, object] = json.loads(result.stdout)
    return answer


def compare(folder: Path, stored: int, dtype: str, budget: int, prompt: int) -> None:
    limit = stored // 3
    resident = run(folder, dtype, 0, 0, prompt)
    assert "memory" in str(run(folder, dtype, 0, limit, prompt)["failed"]).lower()
    banked = run(folder, dtype, budget, limit, prompt)
    assert banked.get("tokens") == resident["tokens"], banked
    assert banked["sum"] == resident["sum"]
    assert int(str(banked["peak_held"])) <= budget
    assert int(str(banked["read"])) > 3 * budget, "the bank must have had to let go of experts"
    assert int(str(banked["peak_resident"])) < stored / 2.5
    assert int(str(resident["peak_resident"])) > stored


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
def test_three_times_the_memory_limit(tmp_path: Path) -> None:
    config = beyond_memory.many_experts(160, 320)
    files = beyond_memory.write_random(config, tmp_path / "model", 64 << 20)
    stored = sum(file.stat().st_size for file in files)
    assert len(files) > 3
    assert 200e6 < stored < 240e6
    compare(tmp_path / "model", stored, "float32", 8_000_000, prompt=40)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
def test_a_larger_one(tmp_path: Path) -> None:
    """1.5 GB against a limit of a third of it; the resident model takes 6 GB."""
    config = beyond_memory.many_experts(200, 768)
    files = beyond_memory.write_random(config, tmp_path / "model", 512 << 20)
    stored = sum(file.stat().st_size for file in files)
    assert 1.4e9 < stored < 2e9
    compare(tmp_path / "model", stored, "bfloat16", 100_000_000, prompt=240)
