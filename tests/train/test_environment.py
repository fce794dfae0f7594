"""What goes wrong around a run, told in one line."""

from __future__ import annotations

import logging
import socket

import pytest
import torch.distributed as dist

from internvl_pack.errors import UserError
from train.environment import check_precision, prepare_environment, silent, telling_of_ports


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


@pytest.mark.parametrize("name", ["ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"])
def test_an_accelerate_that_shards_by_itself_is_refused(name, monkeypatch):
    monkeypatch.setenv(name, "true")
    with pytest.raises(UserError, match=r"accelerate launch: .* give --deepspeed zero_stage1"):
        prepare_environment()


def test_accelerate_launch_has_the_precision_of_the_run(monkeypatch):
    check_precision("bf16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    check_precision("bf16")
    with pytest.raises(UserError, match="mixed_precision bf16: give --bf16 True"):
        check_precision("no")


def test_silent_loggers_speak_again(caplog):
    log = logging.getLogger("internvl_pack.model.build")
    with caplog.at_level(logging.INFO, "internvl_pack"):
        with silent("internvl_pack.model"):
            log.info("kernel")
            log.warning("odd")
        log.info("kernel again")
    assert caplog.messages == ["odd", "kernel again"]
