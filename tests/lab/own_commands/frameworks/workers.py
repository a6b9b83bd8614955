"""Starts COMMAND twice, as a cluster's launcher does: workers.py COMMAND. Each has its number as WORKER, and PORTS of
this machine; where one fails, the other is ended, and its exit code is this one's."""

import os
import socket
import subprocess
import sys
import time

WORKERS = 2

sockets = [socket.socket() for _ in range(WORKERS)]
for one in sockets:
    one.bind(("127.0.0.1", 0))
ports = ",".join(str(one.getsockname()[1]) for one in sockets)
for one in sockets:
    one.close()
started = [
    subprocess.Popen(sys.argv[1:], env={**os.environ, "WORKER": str(number), "PORTS": ports})
    for number in range(WORKERS)
]
while not any(ended := [process.poll() for process in started]) and None in ended:
    time.sleep(0.05)
for process in started:
    process.kill() if any(ended) else process.wait()
failed = next((code for code in ended if code), 0)
sys.exit(128 - failed if failed < 0 else failed)
