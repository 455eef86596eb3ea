"""Engram in decode on a GPU: n-grams hashed on the device, table rows read straight from pinned host memory, gates on streams.

The meaning stands in `model/engram.py`, which runs everywhere else; `gpu.py` is imported only where Triton is.
"""
