"""Runs a Dockerfile's steps where no image can be pulled: in a root of this machine's own files.

Its Python and the libraries of its site-packages are those of the tests, but for this package, which is not there.
What is written goes to memory, and is gone with the root. Its containers share one network of their own.
"""

from __future__ import annotations

import ctypes
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

SETUP = """
set -e
base=$1 sites=$2 there=$3 wheels=$4 hidden=$5
ip link set lo up
mount -t tmpfs -o size=3g none "$there"
cd "$there"
mkdir root volumes; for layer in whole local sites; do mkdir $layer $layer.work; done
mount -t overlay overlay -o lowerdir=/,upperdir="$there/whole",workdir="$there/whole.work" root
mount -t overlay overlay -o lowerdir="$base",upperdir="$there/local",workdir="$there/local.work" root/usr/local
lib=root/usr/local/lib/python$6/site-packages
mount -t overlay overlay -o lowerdir="$sites",upperdir="$there/sites",workdir="$there/sites.work" "$lib"
rm -rf "$lib"/*fewbytes* root/etc/pip.conf root/etc/xdg/pip
mount -t proc proc root/proc
mount --rbind /dev root/dev
mkdir root/wheels
mount --bind "$wheels" root/wheels
for each in $hidden; do mkdir -p "root$each"; mount -t tmpfs -o mode=700 none "root$each"; done
mount -t tmpfs -o mode=1777 none root/tmp
echo "127.0.0.1 localhost server" > root/etc/hosts
chroot root /sbin/ldconfig
"""
SCRIPT = "#!/usr/local/bin/python3\nimport sys\nfrom {module} import {name}\nsys.exit({name}())\n"
NETWORK = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels", "PIP_ROOT_USER_ACTION": "ignore"}
"""What takes the place of the registries that a build asks."""


def permitted() -> bool:
    """Whether this machine lets us make such a root."""
    if sys.platform != "linux" or not all(map(shutil.which, ("unshare", "nsenter", "ip", "mount", "chroot"))):
        return False
    tried = (
        "mount -t tmpfs none /mnt && cd /mnt && mkdir u w r && mount -t overlay o -o lowerdir=/,upperdir=u,workdir=w r"
    )
    return subprocess.run(["unshare", "-mn", "sh", "-c", tried], capture_output=True).returncode == 0


def steps(dockerfile: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions, and what each is about."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", dockerfile, flags=re.MULTILINE)).splitlines()
    return [(name, about) for name, _, about in (line.partition(" ") for line in lines if line.strip())]


class FreshRoot:
    """A root below the folder `place`, from which `wheels` are installed. End it by `close`."""

    def __init__(self, place: Path, wheels: Path) -> None:
        self.place, self.variables, self.user, self.folder = place, dict[str, str](), "0", "/"
        self.health, self.command = "", list[str]()
        sites = {Path(distribution(name).locate_file("")).resolve() for name in ("torch", "prometheus-client")}
        hidden = {"/root", sys.prefix, str(Path(__file__).parents[1])}
        arguments = [
            sys.base_prefix, ":".join(map(str, sites)), str(place), str(wheels), " ".join(sorted(hidden)),
            sysconfig.get_python_version(),
        ]  # fmt: skip
        libc = ctypes.CDLL(None)
        self._first = subprocess.Popen(
            ["unshare", "-mn", "sh", "-c", f"{SETUP}\necho ready; exec sleep 1d", "sh", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=lambda: libc.prctl(1, signal.SIGKILL),
        )  # fmt: skip
        assert self._first.stdout is not None
        said = ""
        while not said.endswith("ready\n"):
            line = self._first.stdout.readline()
            assert line, said
            said += line

    def close(self) -> None:
        """End it, and all mounts in it."""
        self._first.kill()
        self._first.communicate()

    def entered(self, *command: str) -> list[str]:
        """A command in the namespaces of the root, not in the root."""
        return ["nsenter", "-t", str(self._first.pid), "-m", "-n", "--", *command]

    def build(self, dockerfile: str) -> None:
        """Take a Dockerfile's steps."""
        self._scripts()
        for name, about in steps(dockerfile):
            match name:
                case "FROM":
                    pass
                case "RUN":
                    self.run(["sh", "-c", about], NETWORK)
                case "ENV":
                    self.variables |= dict(word.split("=", 1) for word in shlex.split(about))
                case "USER":
                    self.user = about
                case "WORKDIR":
                    self.folder = about
                case "HEALTHCHECK":
                    self.health = about.partition(" CMD ")[2]
                case "CMD":
                    self.command = json.loads(about)
                case _:
                    raise AssertionError(f"a step that this does not know: {name}")

    def _scripts(self) -> None:
        """The commands of pip and Flower, which are of the tests' own environment."""
        for package in ("pip", "flwr"):
            for each in distribution(package).entry_points:
                if each.group == "console_scripts":
                    text = SCRIPT.format(module=each.module, name=each.attr)
                    path = self.place.joinpath("root", "usr", "local", "bin", each.name)
                    write = f"rm -f {path}; cat > {path} && chmod 755 {path}"
                    subprocess.run(self.entered("sh", "-c", write), input=text, text=True, check=True)

    def run(self, command: list[str], variables: dict[str, str] | None = None) -> str:
        """What a command prints, run as the user of the last step."""
        done = subprocess.run(self.inside(command, variables), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def inside(self, command: list[str], variables: dict[str, str] | None = None, volume: str = "") -> list[str]:
        """The command line of a command in the root, with a `volume` at its working directory."""
        home = "/root" if self.user == "0" else "/home/fewbytes"
        path = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": home}
        words = [f"{name}={value}" for name, value in (path | self.variables | (variables or {})).items()]
        bind = 'test -z "$1" || mount --bind "$1" "$2$3"; root=$2 folder=$3 user=$4; shift 4'
        enter = 'exec chroot --userspec="$user:$user" "$root" env -i "$@"'
        there = f"{self.place}/volumes/{volume}" if volume else ""
        return self.entered(
            "unshare", "-m", "sh", "-c", f"{bind}; {enter}", "sh", there, f"{self.place}/root", self.folder, self.user,
            *words, "sh", "-c", f'cd {self.folder} && exec "$@"', "sh", *command,
        )  # fmt: skip

    def volume(self, name: str) -> None:
        """Make a volume, owned as what it is mounted at."""
        make = f"cd {self.place} && mkdir volumes/{name} && chown --reference=root{self.folder} volumes/{name}"
        subprocess.run(self.entered("sh", "-c", make), check=True)
