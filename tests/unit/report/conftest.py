import pytest

from tests.unit.report.synthetic_run import BALANCED, MAKESPAN, PLAIN, write_run


@pytest.fixture
def run_folders(tmp_path):
    """(plain, wlb, makespan)"""
    return (
        write_run(tmp_path / "plain", PLAIN),
        write_run(tmp_path / "wlb", BALANCED, losses=[7.0, 6.8, 6.9, 6.6, 6.7, 6.5]),
        write_run(tmp_path / "makespan", MAKESPAN),
    )
