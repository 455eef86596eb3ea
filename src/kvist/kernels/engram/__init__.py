"""Engram's parts that have fast forms. On a GPU: n-grams hashed on the device, table rows read straight from pinned host memory,
gates on streams; on a CPU: hashing and table rows by the native library.

The meaning stands in `model/engram.py`, which runs everywhere else; `gpu.py` is imported only where Triton is.
"""
