"""The training text of `nano`: where it comes from, how it is cleaned, split, tokenised and packed.

Runs as `python -m kvist.train.corpus build --out data/`. It owns files of text and ids; it knows nothing of models,
losses or devices and imports no torch, so that the packed parts can be unpacked on any machine with numpy alone.
"""
