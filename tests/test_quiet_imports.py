"""Importing a package opens no connection and starts no process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
import composer

FORBIDDEN = ("socket.connect", "socket.getaddrinfo", "socket.bind", "subprocess.Popen", "os.system", "os.exec",
             "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "urllib.Request")
happened = []

def watch(event, arguments):
    if event in FORBIDDEN and importing:
        happened.append(f"{importing[-1]}: {event} {arguments!r:.200}")

importing = []
sys.addaudithook(watch)
names = sorted(module.name for module in pkgutil.walk_packages(composer.__path__, "composer."))
for name in names:
    if name.endswith(("__main__", "evidence._preload")):  # programs; the second describes the machine
        continue
    importing.append(name)
    importlib.import_module(name)
    importing.pop()
print(len(names))
print(*happened, sep="\\n")
"""


def test_importing_every_module_opens_no_connection_and_starts_no_process() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    count, *happened = run.stdout.split("\n")

    assert int(count) > 300
    assert [] == [line for line in happened if line]
