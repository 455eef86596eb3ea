"""The release number, alone in a file so that the build backend and every subpackage can read it.

Knows nothing of the rest of the package and imports nothing.
"""

VERSION = "0.1.0"
