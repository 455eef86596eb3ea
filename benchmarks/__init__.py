"""Measurements of Kvist that are kept: `python -m benchmarks NAME`.

`registry.py` names the benchmarks, `cases.py` says what one consists of, `runner.py` checks and times, `rows.py` keeps
the results, `tables.py` writes them into README, docs/measurements.md and docs/performance.md, `targets.py` says what is
asked for. The package `kvist` knows nothing of this folder.
"""
