"""Token ids and figures of the requests that run and ran last, a key's own only: what the microscope can look at.

Owns what is kept, for how many requests and in how many bytes. Must not know HTTP. In memory only; nothing of it is logged.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvist.engine.progress import Progress
from kvist.engine.replay import Replay
from kvist.engine.request import ImageInput
from kvist.server.errors import ApiError

RECORD_BYTES = 2048
"""What a reply takes beside its tokens: objects, counters, names. A generous count."""
DIGEST_BYTES = 64


@dataclass(kw_only=True, eq=False)
class Trace:
    """One reply: the prompt and its pictures, the tokens so far, and how far it is. `over`: nothing more will come."""

    prompt: array[int]
    images: tuple[ImageInput, ...] = ()
    replay: Replay | None = None
    progress: Progress = field(default_factory=Progress)
    tokens: array[int] = field(default_factory=lambda: array("i"))
    over: bool = False


@dataclass(kw_only=True, eq=False)
class Record:
    """A request with all its replies."""

    number: str
    created: int
    traces: list[Trace]
    running: bool = True
    nbytes: int = 0


class History:
    """Requests by key and id. Running ones are always here; of those that have ended, the last `requests` of each key, in at most
    `limit_bytes` a key. `requests` 0 keeps nothing, running ones neither. `image_token_bytes`: see `Microscope`."""

    def __init__(self, *, requests: int, limit_bytes: int, image_token_bytes: int = 0) -> None:
        self.requests, self.limit_bytes, self.image_token_bytes = requests, limit_bytes, image_token_bytes
        self._tenants: dict[str, OrderedDict[str, Record]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all ended requests."""
        return sum(record.nbytes for records in self._tenants.values() for record in records.values())

    def begin(self, tenant: str, number: str, traces: Sequence[Trace]) -> Record:
        """A request starts. One with an id that its key has used before takes that one's place."""
        record = Record(number=number, created=int(time.time()), traces=list(traces))
        if self.requests:
            records = self._tenants.setdefault(tenant, OrderedDict())
            records.pop(number, None)
            records[number] = record
        return record

    def end(self, tenant: str, record: Record) -> None:
        """A request has ended; the oldest ended ones give way."""
        record.running = False
        record.nbytes = self._size(record)
        for trace in record.traces:
            trace.over = True
        records: OrderedDict[str, Record] = self._tenants.get(tenant, OrderedDict())
        ended = [other for other in records.values() if not other.running]
        total = sum(other.nbytes for other in ended)
        while ended and (len(ended) > self.requests or total > self.limit_bytes):
            oldest = ended.pop(0)
            total -= oldest.nbytes
            del records[oldest.number]
        if not records:
            self._tenants.pop(tenant, None)

    def find(self, tenant: str, names: Sequence[str]) -> Record:
        """The key's request of the first of these names that it has. Raises ApiError."""
        records: Mapping[str, Record] = self._tenants.get(tenant, {})
        for name in names:
            if name in records:
                return records[name]
        kept = f"the last {self.requests} of a key are kept (history_requests)" if self.requests else "history_requests is 0"
        raise ApiError("request_not_found", f"no recent request {names[0][:80]!r} of this key; {kept}", param="request_id")

    def recent(self, tenant: str) -> list[Record]:
        """The key's requests, newest first."""
        return list(reversed(self._tenants.get(tenant, OrderedDict()).values()))

    def _size(self, record: Record) -> int:
        prompts = {id(trace.prompt): len(trace.prompt) for trace in record.traces}  # copies of one prompt share it
        pictures = {image.content: image.tokens for trace in record.traces for image in trace.images}
        total = 4 * sum(prompts.values()) + self.image_token_bytes * sum(pictures.values())
        for trace in record.traces:
            total += RECORD_BYTES + 4 * len(trace.tokens) + DIGEST_BYTES * len(trace.progress.digests)
        return total
