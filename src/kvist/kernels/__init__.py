"""Operators, one folder each: `ref.py` is the meaning; other files in a folder are faster ways to the same values.

Must not know layers, caches or requests. Every public function takes `impl` and never changes it silently.
"""
