"""Runs the sandbox's tests on Debian's kernel in a virtual machine, where cgroup v2 has all controllers.

    python tests/infra/sandbox/virtual_machine.py [--folder build/virtual-machine] [pytest's arguments]

For Debian and its derivatives on x86-64. QEMU emulates the processor, so it needs no KVM. apt-get fetches and verifies
QEMU and the newest kernel; they are unpacked in FOLDER, not installed. The machine reads this file system and cannot
write it. The tests run as root in a cgroup delegated to an ordinary user, whose attacks are thus in cgroups too.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TESTS = ["test_cgroups.py", "test_sandbox.py", "test_sandbox_attacks.py"]
ORDINARY = 65534
_KERNEL = re.compile(r"linux-image-(\d+)\.(\d+)\.(\d+)\S*-amd64(-unsigned)?$")
_RESULT = re.compile(r"the tests ended with (\d+)")
_MODULES = ("netfs", "9pnet", "9pnet_virtio", "9p")
"""Of the file system shared with this machine, in the order of their dependencies."""
_INIT = """#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc none /proc; $b mount -t sysfs none /sys; $b mount -t devtmpfs none /dev
for each in MODULES; do $b insmod /$each.ko; done
$b mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=262144 host /host
for each in proc sys dev; do $b mount --move /$each /host/$each; done
$b mkdir -p /host/dev/shm /host/dev/pts
for each in dev/shm tmp run; do $b mount -t tmpfs none /host/$each; done
$b mount -t devpts none /host/dev/pts
$b mount -t cgroup2 none /host/sys/fs/cgroup
$b cp /tests /host/run/tests
exec $b switch_root /host /bin/sh /run/tests
"""
_TESTS = """
export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/tmp PYTHONDONTWRITEBYTECODE=1
cd ROOT
cgroups=/sys/fs/cgroup
echo "the kernel is $(uname -r), its cgroup v2 has $(cat $cgroups/cgroup.controllers)"
echo "+memory +pids" > $cgroups/cgroup.subtree_control
mkdir -p $cgroups/delegated/tests
chown USER $cgroups/delegated $cgroups/delegated/cgroup.procs $cgroups/delegated/cgroup.subtree_control
echo "+memory +pids" > $cgroups/delegated/cgroup.subtree_control
echo $$ > $cgroups/delegated/tests/cgroup.procs
COMMAND
echo "the tests ended with $?"
echo o > /proc/sysrq-trigger
sleep 60
"""


def main() -> None:
    """Run the tests; exits with pytest's code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("build/virtual-machine"))
    options, arguments = parser.parse_known_args()
    root = options.folder.resolve() / "root"
    if not root.exists():
        unpack(options.folder.resolve())
    files = [str(Path(__file__).with_name(name)) for name in TESTS]
    # Emulated, it is ten times as slow: test_sandbox_attacks takes some minutes for each user.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "3600", *(arguments or files)]
    initial = options.folder.resolve() / "initial.gz"
    initial.write_bytes(gzip.compress(initial_files(root, command)))
    sys.exit(run(root, initial))


def unpack(folder: Path) -> None:
    """Fetch QEMU, busybox and the newest kernel with apt-get, and unpack them in `folder`/root."""
    packages = folder / "packages"
    (packages / "partial").mkdir(parents=True, exist_ok=True)
    found = _output(["apt-cache", "search", "--names-only", "^linux-image-.*amd64"]).splitlines()
    kernels = [match for line in found if (match := _KERNEL.match(line.partition(" ")[0]))]
    newest = max(kernels, key=lambda match: [int(match[number]) for number in (1, 2, 3)])[0]
    subprocess.run(["apt-get", "download", newest], cwd=packages, check=True)
    options = ["-o", "Debug::NoLocking=1", "-o", f"Dir::Cache::archives={packages}", "--no-install-recommends"]
    fetch = ["apt-get", "install", "--yes", "--download-only", *options, "qemu-system-x86", "busybox-static"]
    subprocess.run(fetch, check=True)
    partial = folder / "partial"
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, partial], check=True)
    partial.rename(folder / "root")


def initial_files(root: Path, command: list[str]) -> bytes:
    """The initial file system: an archive of busybox, the modules, and the two scripts."""
    busybox = next(path for path in (root / "bin/busybox", root / "usr/bin/busybox") if path.exists())
    tests = _TESTS.replace("ROOT", shlex.quote(str(ROOT))).replace("USER", str(ORDINARY))
    environment = "LAMINAR_SANDBOX_CGROUP=$cgroups/delegated"
    files = {
        "bin/busybox": busybox.read_bytes(),
        "init": _INIT.replace("MODULES", " ".join(_MODULES)).encode(),
        "tests": tests.replace("COMMAND", f"{environment} {shlex.join(command)}").encode(),
    }
    for name in _MODULES:
        if (module := next(root.glob(f"**/modules/**/{name}.ko*"), None)) is not None:
            data = module.read_bytes()
            files[f"{name}.ko"] = lzma.decompress(data) if module.suffix == ".xz" else data
    return archive(files, ["bin", "proc", "sys", "dev", "host"])


def archive(files: Mapping[str, bytes], folders: list[str]) -> bytes:
    """A cpio archive in the format of initial file systems. Source: Documentation/driver-api/early-userspace."""
    entries = [(name, 0o040755, b"") for name in folders]
    entries += [(name, 0o100755, data) for name, data in files.items()]
    archived = b""
    for number, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        archived += _padded(b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0")
        archived += _padded(data)
    return archived


def run(root: Path, initial: Path) -> int:
    """Run the machine and print its console. Returns pytest's exit code."""
    kernel = next((root / "boot").glob("vmlinuz-*"))
    libraries = ":".join(str(root / folder / "x86_64-linux-gnu") for folder in ("lib", "usr/lib"))
    command = [
        *(str(root / "usr/bin/qemu-system-x86_64"), "-machine", "q35", "-accel", "tcg", "-cpu", "max", "-m", "3G"),
        *("-L", str(root / "usr/share/qemu"), "-L", str(root / "usr/share/seabios"), "-nographic", "-nic", "none"),
        *("-no-reboot", "-kernel", str(kernel), "-initrd", str(initial)),
        *("-append", "console=ttyS0 quiet panic=-1"),
        *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"),
    ]
    code = 1
    environment = os.environ | {"LD_LIBRARY_PATH": libraries}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=environment, text=True, errors="replace", **streams) as machine:  # type: ignore[call-overload]
        for line in machine.stdout:
            print(line, end="", flush=True)
            if ended := _RESULT.search(line):
                code = int(ended[1])
    return code


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
