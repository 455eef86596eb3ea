"""Builds the C sources of this folder into one shared library on first use and loads it.

The library lies in a per-user cache folder under a name made of the sources, the compiler, its flags and the processor's
features, so that a changed source or another machine builds anew. `KVIST_NATIVE_CACHE` moves the folder. Must not know
what the functions compute.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

LOG = logging.getLogger("kvist.kernels")
FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fPIC", "-pthread", "-Wno-psabi")
SEAL_BYTES = hashlib.sha256().digest_size


class NativeBuildError(RuntimeError):
    """The compiler is there but did not accept the sources; the message holds its words."""


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library, built if need be; None, said once in the log, where there is no C compiler."""
    compiler = find_compiler()
    if compiler is None:
        tried = " or ".join(_compilers())
        LOG.warning("no C compiler (%s) on PATH: impl 'cpu' runs the reference operators, several times slower", tried)
        return None
    name = f"kvist-{digest(compiler)}.so"
    path = cache_folder(name) / name
    if path.exists():
        try:
            if whole(path):
                return ctypes.CDLL(str(path))
            LOG.warning("native operators are built again: %s is not what was built", path)
        except OSError as error:
            LOG.warning("native operators are built again: %s", error)
    build(compiler, path)
    LOG.info("native operators built: %s", path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeBuildError(f"{error}; set KVIST_NATIVE_CACHE to a folder whose files may be executed") from error


def find_compiler() -> str | None:
    """$CC (one program, without arguments) if it is set, else the first of cc, gcc, clang on PATH."""
    return next((found for name in _compilers() if (found := shutil.which(name))), None)


def _compilers() -> list[str]:
    return [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]


def machine_flags() -> tuple[str, ...]:
    """What makes the compiler use this processor: -march=native on x86-64, -mcpu=native elsewhere."""
    return ("-march=native",) if platform.machine() in ("x86_64", "AMD64", "i686") else ("-mcpu=native",)


def digest(compiler: str) -> str:
    """Hash of everything the library's bytes depend on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    parts = [version, " ".join((*FLAGS, *machine_flags())).encode(), _processor()]
    for source in sorted(FOLDER.glob("*.[ch]")):
        parts += [source.name.encode(), source.read_bytes()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def cache_folder(name: str) -> Path:
    """A folder only this user writes that holds `name` or takes it; a fresh one for this process if the home's does not."""
    base = os.environ.get("KVIST_NATIVE_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "kvist", "native"
    )
    folder = Path(base)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / name).exists():
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="kvist-native-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        LOG.warning("cannot use %s (%s): native operators are built in %s for this process only", base, error, folder)
    if folder.stat().st_uid != os.getuid():
        raise NativeBuildError(f"{folder} belongs to another user; set KVIST_NATIVE_CACHE to a folder of your own")
    return folder


def build(compiler: str, path: Path) -> None:
    """Compile all sources side by side, link, and move the library to `path` in one step. Raises NativeBuildError.

    First for this processor, then, if the compiler does not know it, for the plain architecture.
    """
    failure = ""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        for options in (machine_flags(), ()):
            built = Path(scratch) / path.name
            failure = _compile_and_link([compiler, *FLAGS, *options], Path(scratch), built)
            if not failure:
                seal(built)
                os.replace(built, path)
                return
            LOG.warning("%s cannot build the native operators with %s", compiler, " ".join(options) or "plain options")
    raise NativeBuildError(f"{compiler} cannot build the native operators; use impl 'ref' or set CC. It says:\n{failure}")


def seal(path: Path) -> None:
    """Put the hash of a file's bytes behind them, where the loader of libraries does not look."""
    made = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(made)


def whole(path: Path) -> bool:
    """Whether a sealed file is as it was sealed. Loading a library that a lost machine cut off would end the process (SIGBUS)."""
    content = path.read_bytes()
    return len(content) > SEAL_BYTES and hashlib.sha256(content[:-SEAL_BYTES]).digest() == content[-SEAL_BYTES:]


def _compile_and_link(command: list[str], scratch: Path, target: Path) -> str:
    """The compiler's complaints; empty if all went well."""
    running = []
    # The largest first: what takes long then does not end alone on one processor.
    for source in sorted(FOLDER.glob("*.c"), key=lambda source: -source.stat().st_size):
        arguments = [*command, "-c", str(source), "-o", str(scratch / f"{source.stem}.o")]
        running.append(subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True))
    failures = [process.communicate()[1] for process in running]
    if any(process.returncode for process in running):
        return "\n".join(failure for failure in failures if failure) or "the compiler failed without a word"
    objects = [str(scratch / f"{source.stem}.o") for source in sorted(FOLDER.glob("*.c"))]
    link = [*command, "-shared", *objects, "-o", str(target), "-lm"]
    result = subprocess.run(link, capture_output=True, text=True, check=False)
    return result.stderr or "the linker failed without a word" if result.returncode else ""


def _processor() -> bytes:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = [line for line in lines if line.lower().startswith(("flags", "features", "model name"))]
    return "\n".join(features[:2] or [platform.machine(), platform.processor()]).encode()
