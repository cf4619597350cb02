"""TCP ports of this machine that are taken: told before anything is loaded, with their holder."""

import contextlib
import os
import socket

import psutil


def check_master_port(port: int) -> None:
    """Whether rank 0 can listen on `port`, where the learner's ranks meet.

    Raises:
        OSError: it cannot; names the port's holder, as far as the system tells, and the way out.
    """
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        reason = os.strerror(error.errno) + port_holder(port)
        raise OSError(
            f"the learner's ranks cannot meet at port {port}: {reason}; end that process or take another port: "
            f"PORT={port + 1} behind make train or make grpo (deepspeed --master_port {port + 1})"
        ) from error


def port_holder(port: int) -> str:
    """Who listens on `port`, as far as the system tells this user; for an error message."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f"; held by process {connection.pid}: {command[:200]}"
    return ""
