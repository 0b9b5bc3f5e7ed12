"""A shell on another of the machines that machines.py makes, for MPICH's launcher in place of ssh.

    remote_shell.py serve                        the first process of a machine: it runs what it is sent
    remote_shell.py [-OPTION ...] HOST COMMAND   sends it, with this process's standard streams

Unlike `nsenter`, it has no process on the other machine: where that is lost, only the network can tell.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

PORT, CONNECT_S = 2222, 5.0


def serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the first process reaps all
    with socket.create_server(("", PORT), backlog=64) as listener:
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb", buffering=0) as sent:
                command = sent.readline().decode()
                restore = ["env", "--default-signal=CHLD", "sh", "-c", command]
                subprocess.Popen(restore, stdin=connection, stdout=connection, stderr=connection).returncode = 0


def send(host: str, command: str) -> int:
    try:
        connection = socket.create_connection((host, PORT), CONNECT_S)
    except OSError as error:
        print(f"connect to host {host} port {PORT}: {error}", file=sys.stderr)
        return 255
    connection.settimeout(None)
    connection.sendall(f"cd {os.getcwd()} && exec {command}\n".encode())
    threading.Thread(target=_pass_on_input, args=(connection,), daemon=True).start()
    while True:
        read = connection.recv(1 << 16)
        if not read:
            return 0
        os.write(1, read)


def _pass_on_input(connection: socket.socket) -> None:
    while True:
        read = os.read(0, 1 << 16)
        if not read:
            connection.shutdown(socket.SHUT_WR)
            return
        connection.sendall(read)


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if not word.startswith("-")]
    first = sys.argv.index(given[0])
    sys.exit(serve() if given == ["serve"] else send(given[0], " ".join(sys.argv[first + 1 :])))
