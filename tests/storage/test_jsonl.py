"""Files stay whole when the disk is full, and say where they are damaged."""

import errno
import os

import pytest

from specbench.storage import jsonl


def test_damage_in_the_middle_is_refused_with_file_and_line(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text('{"a": 1}\nrubbish\n{"a": 2}\n')
    with pytest.raises(jsonl.RecordError, match=r"cases\.jsonl, line 2"):
        jsonl.read_jsonl(path)


def test_a_full_disk_leaves_only_whole_groups(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    jsonl.append_jsonl(path, [{"group": 1}])
    write = os.write
    taken = iter([5])  # the disk takes five bytes of the second group, then no more

    def nearly_full(fd, data):
        for count in taken:
            return write(fd, bytes(data)[:count])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jsonl.os, "write", nearly_full)
    with pytest.raises(jsonl.DiskError, match=r"x\.jsonl: No space left"):
        jsonl.append_jsonl(path, [{"group": 2}])
    monkeypatch.undo()
    assert path.read_text() == '{"group":1}\n'
    jsonl.append_jsonl(path, [{"group": 2}])
    assert jsonl.read_jsonl(path) == ([{"group": 1}, {"group": 2}], False)


def test_replacing_a_file_fails_without_touching_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "manifest.json"
    jsonl.write_json(path, {"old": 1})

    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jsonl.os, "write", full)
    with pytest.raises(jsonl.DiskError):
        jsonl.write_json(path, {"new": 2})
    assert jsonl.read_json(path) == {"old": 1}
