"""What W&B wrote offline, read back: ``run-<id>.wandb`` is a log in the form of LevelDB's."""

import json
import struct
from dataclasses import dataclass, field

BLOCK = 32768
_HEADER, _PART = 7, 7  # bytes before the first record, and before each part of one
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path):
    """The records of a file, each a protocol buffer."""
    from wandb.proto import wandb_internal_pb2

    data, place, parts = path.read_bytes(), _HEADER, []
    assert data[:4] == b":W&B"
    while place + _PART <= len(data):
        left = BLOCK - place % BLOCK
        if left < _PART:  # the rest of a block is filled with zeros
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + _PART])
        parts.append(data[place + _PART : place + _PART + length])
        place += _PART + length
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record
        else:
            assert kind in (_FIRST, _MIDDLE)


@dataclass
class Written:
    """One W&B run: what names it, its configuration and summary, and the files beside."""

    run: object
    config: dict = field(default_factory=dict)
    summary: dict = field(default_factory=dict)
    artifacts: list = field(default_factory=list)


def read(path):
    """What a file says of its run."""
    found = None
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run" and found is None:
            found = Written(record.run)
            found.config = {u.key: json.loads(u.value_json) for u in record.run.config.update}
        elif kind == "summary":
            for item in record.summary.update:
                found.summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        elif kind == "history":
            for item in record.history.item:
                key = item.key or "/".join(item.nested_key)
                found.summary.setdefault(key, json.loads(item.value_json))
        elif kind == "artifact":
            found.artifacts.append(record.artifact)
        elif kind == "request" and record.request.HasField("log_artifact"):
            found.artifacts.append(record.request.log_artifact.artifact)
    return found
