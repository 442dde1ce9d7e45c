"""Importing a package opens no connection and starts no process, but for what its dependencies do.

On import, torch asks `ldconfig` for libraries, and urllib3 whether there is IPv6.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys, sysconfig

FORBIDDEN = ("socket.connect", "socket.getaddrinfo", "socket.bind", "subprocess.Popen", "os.system", "os.exec",
             "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "urllib.Request")
STANDARD = sysconfig.get_path("stdlib")
happened = []

def caller():
    # The module that called into the standard library.
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<frozen") and ("site-packages" in file or not file.startswith(STANDARD)):
            return frame.f_globals.get("__name__", "")
        frame = frame.f_back
    return ""

def watch(event, arguments):
    if event in FORBIDDEN and caller().startswith("composer"):
        happened.append(f"{caller()}: {event} {arguments!r:.200}")

sys.addaudithook(watch)
import composer

names = sorted(module.name for module in pkgutil.walk_packages(composer.__path__, "composer."))
for name in names:
    if not name.endswith(("__main__", "evidence._preload")):  # programs; the second describes the machine
        importlib.import_module(name)
print(len(names))
print(*happened, sep="\\n")
"""


def test_importing_every_module_opens_no_connection_and_starts_no_process() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    count, *happened = run.stdout.split("\n")

    assert int(count) > 300
    assert [] == [line for line in happened if line]
