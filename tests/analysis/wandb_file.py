"""What W&B wrote offline, read back: ``run-<id>.wandb`` is a log in the form of LevelDB's."""

import json
import struct
from types import SimpleNamespace

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


def read(path):
    """One W&B run: what names it, its configuration and summary, and the artifacts beside."""
    content = SimpleNamespace(run=None, config={}, summary={}, artifacts=[])
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run" and content.run is None:
            content.run = record.run
            content.config = {u.key: json.loads(u.value_json) for u in record.run.config.update}
        elif kind == "summary":
            for item in record.summary.update:
                content.summary[_key(item)] = json.loads(item.value_json)
        elif kind == "history":
            for item in record.history.item:
                content.summary.setdefault(_key(item), json.loads(item.value_json))
        elif kind == "artifact":
            content.artifacts.append(record.artifact)
        elif kind == "request" and record.request.HasField("log_artifact"):
            content.artifacts.append(record.request.log_artifact.artifact)
    return content


def _key(item):
    return item.key or "/".join(item.nested_key)
