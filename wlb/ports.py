"""A port for processes to meet at."""

from __future__ import annotations

import random
import socket

# Below those that systems give to connections as they are made (from 32,768 on Linux): one of theirs may be taken by
# any connection between the moment it is chosen and the moment its server listens, gloo's own ones among them.
_PORTS = range(15_000, 32_000)
_TRIES = 100


def free_port() -> int:
    """A TCP port on which nobody listens now, at random, so that runs that start side by side choose apart.

    Raises OSError if none of 100 is free.
    """
    choices = random.SystemRandom()  # a seed of the caller's must not make two runs choose alike
    for _ in range(_TRIES):
        port = choices.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"a free port must be in [{_PORTS.start}, {_PORTS.stop}), but {_TRIES} of them are taken")


if __name__ == "__main__":
    print(free_port())
