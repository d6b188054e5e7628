"""A copy of the synthetic run that a test may spoil."""

import shutil

import pytest

from tests.analysis.folders import RECORDS


@pytest.fixture
def results(tmp_path):
    """A folder with the run in ``one``."""
    shutil.copytree(RECORDS / "synthetic", tmp_path / "one")
    return tmp_path
