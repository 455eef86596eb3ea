"""Measurements of Kvist that are kept: `python -m benchmarks NAME`.

`registry.py` names the benchmarks, `cases.py` says what one consists of, `runner.py` checks and times, `rows.py` keeps
the results, `tables.py` turns them into README tables. The package `kvist` knows nothing of this folder.
"""
