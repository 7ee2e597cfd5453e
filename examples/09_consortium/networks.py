"""Hosts on one switch, each in a network namespace of its own; on this machine's loopback where none can be made."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Self


class Network:
    """A context that makes hosts and removes them at its end. `real`: whether they have namespaces; if not, each has
    a loopback address of its own."""

    def __init__(self, real: bool = True) -> None:
        self.real, self._mine, self._hosts = real, f"fewbytes-{os.getpid()}", list[str]()

    def __enter__(self) -> Self:
        if self.real and (why := self._switch()):
            print(f"no network namespaces here ({why}): all hosts use this machine's loopback", flush=True)
            self.real = False
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self._hosts, "switch") if self.real else ():
            subprocess.run(["ip", "netns", "delete", f"{self._mine}-{name}"], capture_output=True, check=False)

    def add(self, name: str) -> str:
        """Make a host of that name; its address."""
        self._hosts.append(name)
        number = len(self._hosts)
        if not self.real:
            return f"127.0.0.{number}"
        host, switch = f"{self._mine}-{name}", f"{self._mine}-switch"
        address, port = f"10.90.0.{number}", f"port{number}"
        _ip("netns", "add", host)
        _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
        _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", host, "link", "set", device, "up")
        return address

    def on(self, host: str, command: list[str]) -> list[str]:
        """A command as it runs on a host."""
        return ["ip", "netns", "exec", f"{self._mine}-{host}", *command] if self.real else command

    def _switch(self) -> str:
        """Make the switch; why it cannot be made, or an empty text."""
        if shutil.which("ip") is None:
            return "there is no command `ip`"
        switch = f"{self._mine}-switch"
        try:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            subprocess.run(["ip", "netns", "exec", switch, "true"], capture_output=True, text=True, check=True)
        except subprocess.CalledProcessError as error:
            subprocess.run(["ip", "netns", "delete", switch], capture_output=True, check=False)
            return (error.stderr.strip().splitlines() or ["refused"])[-1]
        return ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
