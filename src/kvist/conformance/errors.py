"""The one error of this package: a folder that is not a golden case of the documented format.

Must not know what a case contains.
"""

from __future__ import annotations


class CaseError(ValueError):
    """A malformed case. The message names the file, what was found there and what the format asks for."""
