"""Files stay whole when the disk is full, and say where they are damaged."""

import errno
import json
import os

import pytest

from specbench.errors import OutputRefused
from specbench.storage import jsonl


def test_damage_in_the_middle_is_refused_with_file_and_line(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text('{"a": 1}\nrubbish\n{"a": 2}\n')
    with pytest.raises(jsonl.RecordError, match=r"cases\.jsonl, line 2"):
        jsonl.read_jsonl(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": -1e999}', "too large"),
        ('{"a": 1e999}', "too large"),
        ('{"a": 12345678901234567890}', "too large an integer"),
        ('{"a": ' + "1" * 5000 + "}", "4300 digits"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"a": "\\udc00"}', r"\\udc00 is half a character"),
        ('{"\\ud83d": 1}', "half a character"),
    ],
)
def test_what_could_not_be_worked_with_is_refused_with_its_line(tmp_path, text, reason):
    path = tmp_path / "cases.jsonl"
    path.write_text('{"a": 1}\n' + text + '\n{"a": 2}\n')
    with pytest.raises(jsonl.RecordError, match=rf"cases\.jsonl, line 2: .*{reason}") as refusal:
        jsonl.read_jsonl(path)
    assert refusal.value.exit_code == 2


def test_whole_characters_and_long_numbers_are_read(tmp_path):
    path = tmp_path / "cases.jsonl"
    line = {"a": "\U0001f600", "b": 2**63 - 1, "c": 0.00012345678901234567, "d": [[1]] * 200}
    path.write_text(json.dumps(line) + "\n")
    assert jsonl.read_jsonl(path) == ([line], False)


def test_a_byte_order_mark_is_no_part_of_a_value(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xef\xbb\xbf"}\n\xef\xbb\xbf{"a": 1}\n')
    assert jsonl.read_jsonl(path) == ([{"a": "\ufeff"}, {"a": 1}], False)
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert jsonl.read_json(path) == {"a": 1}


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


def test_a_path_that_cannot_be_a_file_s_is_no_disk_s_fault(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "x.json", tmp_path / ("long" * 100)):
        with pytest.raises(OutputRefused, match="Name another file or folder"):
            jsonl.write_text(path, "x") if path != tmp_path else jsonl.append_jsonl(path, [{}])


def test_replacing_a_file_fails_without_touching_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "manifest.json"
    jsonl.write_json(path, {"old": 1})

    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jsonl.os, "write", full)
    with pytest.raises(jsonl.DiskError):
        jsonl.write_json(path, {"new": 2})
    assert jsonl.read_json(path) == {"old": 1}
