import pytest

from tests.unit.report.synthetic_run import BALANCED, PLAIN, write_run


@pytest.fixture
def run_folders(tmp_path):
    """(plain, balanced)"""
    return write_run(tmp_path / "plain", PLAIN), write_run(tmp_path / "wlb", BALANCED)
