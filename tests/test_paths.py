"""Names of files made of what users type."""

import pytest

from specbench.paths import file_name
from tests.small_run import run_here


@pytest.mark.parametrize("text", ["a/b", "..", ".", "", "../../x", 'a\\b:c*?"<>|\n', "é" * 300])
def test_a_name_is_one_part_of_a_path_whatever_the_text(tmp_path, text):
    file = tmp_path / file_name(text)
    file.touch(exist_ok=False)
    assert [*tmp_path.iterdir()] == [file]
    assert not set(file.name) & set('/\\:*?"<>|\n')


def test_a_run_s_folder_has_its_label_whole(small, tmp_path):
    typed = ["method.label=half/../other: one", "dataset.limit=1", f"paths.results={tmp_path}"]
    assert run_here(small, *typed) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("half_.._other__one-")
