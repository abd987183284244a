"""Ports for processes that will listen on them."""

from __future__ import annotations

import socket

import pytest

from jitney.engine.common.ports import free_port


def test_a_port_is_none_that_a_connection_gets_by_itself():
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 10 and all(20_000 <= port < 32_768 for port in ports)


def test_a_port_is_free_at_the_address_and_an_address_is_ours():
    with socket.create_server(("127.0.0.1", free_port("localhost"))):
        pass
    with pytest.raises(OSError, match="assign requested address"):
        free_port("192.0.2.1")
