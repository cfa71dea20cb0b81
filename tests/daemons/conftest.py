import pytest

from tests.daemons.processes import Daemon


@pytest.fixture
def start(tmp_path):
    """start(command, *words, log=name): a daemon that does not outlive the test."""
    daemons = []

    def begin(command: str, *words: object, log: str) -> Daemon:
        daemons.append(Daemon(command, *map(str, words), log=tmp_path / f"{log}.log"))
        return daemons[-1]

    yield begin
    for daemon in daemons:
        daemon.kill()
