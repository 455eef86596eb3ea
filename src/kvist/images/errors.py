"""The one error of this package, for whatever a picture or the size of a picture can cause.

Knows nothing of how pictures are read or cut.
"""


class ImageError(ValueError):
    """A picture that cannot be used. The message names the offending value, the limit and the way out."""
