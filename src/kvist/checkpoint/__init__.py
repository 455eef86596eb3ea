"""Checkpoints in the released format: find, load, save, convert, inspect, verify.

Other packages import from here. The only place that knows foreign tensor names and containers.
"""

from kvist.checkpoint.about import is_base
from kvist.checkpoint.bounded import CacheCounters
from kvist.checkpoint.contents import Finding, compare
from kvist.checkpoint.convert import convert
from kvist.checkpoint.engram_store import EngramCounters, EngramStore
from kvist.checkpoint.expert_bank import ExpertStore
from kvist.checkpoint.fingerprint import fingerprint
from kvist.checkpoint.formats import Checkpoint, CheckpointMismatch, open_checkpoint
from kvist.checkpoint.inspect import Inspection, inspect
from kvist.checkpoint.load import (
    FetchCounters,
    ModelState,
    build_model,
    expert_store,
    fetch_counters,
    load_model,
    open_files,
    read_state,
    token_classes,
)
from kvist.checkpoint.locate import ModelNotFound, locate
from kvist.checkpoint.reads import FileReads, ReadFailed
from kvist.checkpoint.save import save_checkpoint
from kvist.checkpoint.tables import EngramTable, open_tables
from kvist.checkpoint.tensors import TensorFiles
from kvist.checkpoint.verify import VerifyReport, verify

__all__ = [
    "CacheCounters",
    "Checkpoint",
    "CheckpointMismatch",
    "EngramCounters",
    "EngramStore",
    "EngramTable",
    "ExpertStore",
    "FetchCounters",
    "FileReads",
    "Finding",
    "Inspection",
    "ModelNotFound",
    "ModelState",
    "ReadFailed",
    "TensorFiles",
    "VerifyReport",
    "build_model",
    "compare",
    "convert",
    "expert_store",
    "fetch_counters",
    "fingerprint",
    "inspect",
    "is_base",
    "load_model",
    "locate",
    "open_checkpoint",
    "open_files",
    "open_tables",
    "read_state",
    "save_checkpoint",
    "token_classes",
    "verify",
]
