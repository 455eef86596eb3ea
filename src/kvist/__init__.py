"""Kvist: the complete DeepSeek-V4.1-Flash system in one package.

Importing `kvist` costs nothing: subpackages (`kvist.config`, `kvist.model`, ...) load torch and friends only when they
are imported themselves. This file must not import any of them.
"""

from kvist.version import VERSION as __version__

__all__ = ["__version__"]
