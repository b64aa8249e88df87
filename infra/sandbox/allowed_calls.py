"""The system calls that a program in the sandbox may make, by name: their numbers on x86-64 and on aarch64.

Every other call fails with EPERM, so calls of newer kernels are refused until they are added here. Left out on purpose,
beside all that starts processes, opens sockets, traces, mounts or needs privileges:

- calls on files that Landlock does not see: chmod, chown, utimensat, setxattr and their kin;
- locks and leases (flock, fcntl): a program could block others that use a file that it may only read;
- fallocate and memfd_create, which take disk and memory past the limits; links, folders, nodes;
- everything about another process, its scheduling included; System V and POSIX queues, keyrings;
- interfaces that had many vulnerabilities: io_uring, userfaultfd, bpf, perf, splice, inotify, futexes of priorities.

Source of the numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux.
"""

from __future__ import annotations

NEWEST = 462
"""Calls above are unknown here and fail with ENOSYS, as on an older kernel, so that libc falls back to older calls."""

# fmt: off
ALLOWED: dict[str, tuple[int | None, int | None]] = {
    # files
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "lseek": (8, 62), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65),
    "writev": (20, 66), "access": (21, None), "dup": (32, 23), "dup2": (33, None), "sendfile": (40, 71),
    "truncate": (76, 45), "ftruncate": (77, 46), "getdents": (78, None), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "rename": (82, None), "creat": (85, None), "unlink": (87, None), "readlink": (89, None),
    "umask": (95, 166), "statfs": (137, 43), "fstatfs": (138, 44), "getdents64": (217, 61), "openat": (257, 56),
    "newfstatat": (262, 79), "unlinkat": (263, 35), "renameat": (264, 38), "readlinkat": (267, 78),
    "faccessat": (269, 48), "dup3": (292, 24), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286),
    "pwritev2": (328, 287), "copy_file_range": (326, 285), "statx": (332, 291), "close_range": (436, 436),
    "faccessat2": (439, 439),
    # memory
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216), "msync": (26, 227),
    "madvise": (28, 233),
    # pipes, and waiting for them
    "poll": (7, None), "pipe": (22, None), "select": (23, None), "epoll_create": (213, None), "pselect6": (270, 72),
    "ppoll": (271, 73), "epoll_wait": (232, None), "epoll_ctl": (233, 21), "epoll_pwait": (281, 22),
    "eventfd2": (290, 19), "epoll_create1": (291, 20), "pipe2": (293, 59), "epoll_pwait2": (441, 441),
    "recvfrom": (45, 207), "shutdown": (48, 210), "getsockname": (51, 204), "getpeername": (52, 205),
    "getsockopt": (55, 209),
    # its own signals, timers and threads
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pause": (34, None),
    "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128), "sched_yield": (24, 124), "nanosleep": (35, 101), "exit": (60, 93),
    "exit_group": (231, 94), "set_tid_address": (218, 96), "set_robust_list": (273, 99), "rseq": (334, 293),
    # what time it is, and who this is
    "gettimeofday": (96, 169), "time": (201, None), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "getpid": (39, 172), "uname": (63, 160), "getrusage": (98, 165),
    "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175),
    "getegid": (108, 177), "getppid": (110, 173), "getgroups": (115, 158), "getresuid": (118, 148),
    "getresgid": (120, 150), "gettid": (186, 178), "getcpu": (309, 168), "getrandom": (318, 278),
}

ANSWERED: dict[str, tuple[int | None, int | None, int]] = {
    # clone3 has its flags behind a pointer: libc does with clone where there is none. glibc writes where it cannot
    # allocate. Nothing here outlives the program, so there is nothing to keep safe on a disk.
    "clone3": (435, 435, 38), "fallocate": (285, 47, 95), "fsync": (74, 82, 0), "fdatasync": (75, 83, 0),
}
"""Calls that the filter answers itself with this error number (0: success)."""

FILTERED: dict[str, tuple[int, int]] = {
    "clone": (56, 220), "kill": (62, 129), "tgkill": (234, 131), "fcntl": (72, 25), "ioctl": (16, 29),
    "mmap": (9, 222), "futex": (202, 98), "socketpair": (53, 199), "sendto": (44, 206), "prlimit64": (302, 261),
    "prctl": (157, 167), "sched_getaffinity": (204, 123),
}
"""Calls whose arguments are filtered, in seccomp.py."""
# fmt: on
