"""Namespaces: a process and its children see only processes, files, networks and queues of their own.

The zygote enters its namespaces once. Each program then enters nested ones: its process has id 1 in a PID namespace,
the kernel counts its threads apart from the user's, and it writes to a memory file system of bounded size. Imports
nothing but the standard library.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from infra.sandbox import linux

WORK = "/laminar-sandbox"
"""The working folder of a program: the mount point of its own file system."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_BLOCK = 4096


class Jail:
    """The zygote's namespaces: a read-only root, and no network, queue or host name shared with the machine."""

    def __init__(self, readable: Iterable[str]) -> None:
        """Enter them. Raises OSError where the kernel or its administrator does not permit it."""
        self._proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
        self._user, self._group = os.getuid(), os.getgid()
        linux.unshare(linux.CLONE_NEWUSER)
        self._keep_identity()
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS)
        _enter_root_of([path for path in readable if not path.startswith("/dev/")])

    def enter_nested(self, disk_bytes: int) -> None:
        """In the monitor: enter the namespaces of one program, which the monitor forks next. Raises OSError."""
        linux.unshare(linux.CLONE_NEWUSER)
        self._keep_identity()
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWPID)
        files = disk_bytes // _BLOCK + 16
        flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
        linux.mount("tmpfs", WORK, "tmpfs", flags, f"size={disk_bytes},nr_inodes={files},mode=0700")
        os.chdir(WORK)

    def _keep_identity(self) -> None:
        # The new root has no /proc: use the old one's, in which "self" is the process that opens it.
        self._write("self/setgroups", "deny")
        self._write("self/uid_map", f"{self._user} {self._user} 1")
        self._write("self/gid_map", f"{self._group} {self._group} 1")

    def _write(self, name: str, text: str) -> None:
        descriptor = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._proc)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def work_is_full() -> bool:
    """Whether a program has filled its file system."""
    state = os.statvfs(WORK)
    return state.f_bfree == 0 or state.f_ffree == 0


def _enter_root_of(readable: Iterable[str]) -> None:
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    root = "/proc"  # exists everywhere and contains no path that is shown; only this namespace sees the mount
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=64k,nr_inodes=256,mode=0755")
    shown: list[str] = []
    for path in [*readable, *_DEVICES]:
        if os.path.lexists(path) and not any(path == each or path.startswith(each + "/") for each in shown):
            if not os.path.islink(path):
                shown.append(path)
            _show(path, root + path)
    os.mkdir(root + WORK)
    linux.limit_mount(root, linux.MOUNT_RDONLY, below=False)
    linux.enter_root(root)


def _show(path: str, target: str) -> None:
    """Mount `path` read-only at `target`; a link is copied."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    linux.mount(path, target, "", linux.MS_BIND | linux.MS_REC)
    device = 0 if path in _DEVICES else linux.MOUNT_NODEV
    linux.limit_mount(target, linux.MOUNT_RDONLY | linux.MOUNT_NOSUID | device, below=True)
