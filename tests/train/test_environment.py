"""What goes wrong around a run, told in one line."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from internvl_pack.errors import UserError
from train.environment import telling_of_ports


def test_a_port_in_use_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match=rf"^port {port} of .* is in use.*MASTER_PORT") as caught,
            telling_of_ports(),
        ):
            dist.TCPStore("127.0.0.1", port, world_size=1, is_master=True)
    assert "\n" not in str(caught.value)


def test_other_errors_of_the_network_are_left_alone():
    with pytest.raises(dist.DistNetworkError, match="no route"), telling_of_ports():
        raise dist.DistNetworkError("no route to host")
