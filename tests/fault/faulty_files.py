"""A disk that fails on command: the file-system port of a store with a full disk, I/O errors, short and slow calls."""

from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import dataclass

from kvist.cache.page_file import FileSystem


@dataclass
class FaultyFiles(FileSystem):
    """`room`: bytes that may still be written beyond the end of a file; errors: what the next calls raise, once each; `stuck`:
    what calls of the kind `stuck_at` (read, write, sync) wait for."""

    room: int | None = None
    open_error: int = 0
    read_errors: int = 0
    write_errors: int = 0
    sync_errors: int = 0
    read_delay_s: float = 0.0
    write_delay_s: float = 0.0
    longest_write: int | None = None
    no_direct: bool = False
    raised: int = 0
    stuck: threading.Event | None = None
    stuck_at: str = "read"

    def open(self, path, flags):
        if self.no_direct and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        if self.open_error:
            raise OSError(self.open_error, os.strerror(self.open_error), str(path))
        return super().open(path, flags)

    def read(self, fd, count, offset):
        self._hang("read")
        time.sleep(self.read_delay_s)
        if self.read_errors:
            self.read_errors -= 1
            self._fail(errno.EIO)
        return super().read(fd, count, offset)

    def read_into(self, fd, buffers, offset):
        self._hang("read")
        time.sleep(self.read_delay_s)
        if self.read_errors:
            raise OSError(errno.EIO, os.strerror(errno.EIO))  # not counted: the pages are then read one by one
        return super().read_into(fd, buffers, offset)

    def write(self, fd, data, offset):
        self._hang("write")
        time.sleep(self.write_delay_s)
        if self.write_errors:
            self.write_errors -= 1
            self._fail(errno.EIO)
        if self.longest_write is not None:
            data = data[: self.longest_write]
        if self.room is not None:
            growth = max(offset + len(data) - self.size(fd), 0)
            if growth > self.room:
                # a direct write takes whole sectors
                data = data[: max(len(data) - growth + self.room, 0) // 512 * 512]
                if not data:
                    self._fail(errno.ENOSPC)
            self.room -= min(growth, self.room)
        return super().write(fd, data, offset)

    def sync(self, fd):
        self._hang("sync")
        if self.sync_errors:
            self.sync_errors -= 1
            self._fail(errno.EIO)
        super().sync(fd)

    def _hang(self, kind):
        if self.stuck is not None and kind == self.stuck_at:
            self.stuck.wait()

    def _fail(self, number: int):
        self.raised += 1
        raise OSError(number, os.strerror(number))
