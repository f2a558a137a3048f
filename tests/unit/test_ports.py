"""Ports at which processes meet."""

import random
import socket

import pytest

from wlb import ports


def test_a_port_is_free_and_none_that_connections_are_given():
    given = {ports.free_port() for _ in range(50)}
    assert len(given) > 45
    assert all(15_000 <= port < 32_000 for port in given)
    with socket.socket() as server:
        server.bind(("127.0.0.1", given.pop()))
        server.listen()


def test_runs_with_one_seed_choose_apart():
    chosen = []
    for _ in range(2):
        random.seed(1)
        chosen.append([ports.free_port() for _ in range(4)])
    assert chosen[0] != chosen[1]


def test_a_port_that_is_taken_is_passed_by(monkeypatch):
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports, "_PORTS", range(taken, taken + 1))
        with pytest.raises(OSError, match=rf"must be in \[{taken}, {taken + 1}\), but 100 of them are taken"):
            ports.free_port()
