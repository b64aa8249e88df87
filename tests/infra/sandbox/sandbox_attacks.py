"""Programs that try to escape from the sandbox: each prints EFFECT if it succeeded.

The tests create the targets: a VICTIM process, the PARENT that supervises, a SECRET file in a folder OUTSIDE, listening
sockets. Calls that would harm the machine if they worked have arguments that every kernel rejects; there only the
sandbox's own refusal, EPERM or ENOSYS, counts. All attacks are bounded in number and time should they work.
"""

from __future__ import annotations

PRELUDE = """
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, struct, sys, threading, time
L = ctypes.CDLL(None, use_errno=True)
L.syscall.restype = ctypes.c_long
ARM = os.uname().machine == 'aarch64'
def call(numbers, *arguments):
    given = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    ctypes.set_errno(0)
    result = L.syscall(ctypes.c_long(numbers[ARM]), *given)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def effect():
    print('EFFECT', flush=True)
def refused(numbers, *arguments):
    try: call(numbers, *arguments)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS): return
    effect()
"""

FILES = {
    "read a file": "open(SECRET).read(); effect()",
    "write a file": "open(SECRET, 'a').write('x'); effect()",
    "truncate a file": "os.truncate(SECRET, 0); effect()",
    "chmod": "os.chmod(SECRET, 0o644); effect()",
    "chmod a folder": "os.chmod(OUTSIDE, 0o777); effect()",
    "fchmod of a readable file": "f = os.open(os.__file__, 0); os.fchmod(f, os.fstat(f).st_mode & 0o777); effect()",
    "fchmodat2": "call((452, 452), -100, SECRET.encode(), 0o777, 0); effect()",
    "chown": "os.chown(SECRET, os.getuid(), os.getgid()); effect()",
    "utime": "os.utime(SECRET, (0, 0)); effect()",
    "setxattr": "os.setxattr(SECRET, 'user.attack', b'x'); effect()",
    "fsetxattr of a readable file": "os.setxattr(os.open(os.__file__, 0), 'user.attack', b'x'); effect()",
    "setxattrat": "refused((463, 463), -100, SECRET.encode(), 0, b'user.attack', 0, 0)",
    "file_setattr": "refused((469, 469), -100, SECRET.encode(), 0, 0, 0)",
    "removexattr": "os.removexattr(SECRET, 'user.mark'); effect()",
    "unlink": "os.unlink(SECRET); effect()",
    "rename into the folder": "os.rename(SECRET, 'mine'); effect()",
    "rename out of the folder": "open('mine', 'w').close(); os.rename('mine', OUTSIDE + '/laminar-attack'); effect()",
    "hard link": "os.link(SECRET, 'mine'); effect()",
    "hard link of a readable file": "os.link(os.__file__, 'mine'); effect()",
    "symbolic link": "os.symlink(SECRET, 'mine'); open('mine', 'a').write('x'); effect()",
    "symbolic link race": """
def swap():
    for _ in range(2000):
        for make in (lambda: open('mine', 'w').close(), lambda: os.unlink('mine'), lambda: os.symlink(SECRET, 'mine')):
            try: make()
            except OSError: pass
swapper = threading.Thread(target=swap); swapper.start()
while swapper.is_alive():
    try: open('mine', 'a').write('x')
    except OSError: continue
    if os.path.islink('mine'): effect()
""",
    "hard link race": """
def swap():
    for _ in range(2000):
        try: os.link(SECRET, 'mine')
        except OSError: pass
swapper = threading.Thread(target=swap); swapper.start()
while swapper.is_alive():
    try: os.truncate('mine', 0); effect()
    except OSError: pass
""",
    "create in /tmp": "open('/tmp/laminar-attack', 'w'); effect()",
    "create in /dev/shm": "open('/dev/shm/laminar-attack', 'w'); effect()",
    "create beside the folder": "open('../laminar-attack', 'w'); effect()",
    "folder in /tmp": "os.mkdir('/tmp/laminar-attack'); effect()",
    "nameless file in /tmp": "os.open('/tmp', os.O_TMPFILE | os.O_RDWR); effect()",
    "device node": "os.mknod('node', 0o600 | 0o020000, os.makedev(1, 1)); effect()",
    "from the root by a descriptor": "os.open(SECRET[1:], 0, dir_fd=os.open('/', os.O_PATH)); effect()",
    "open_by_handle_at": "refused((304, 265), -1, 0, 0)",
    "lock a readable file": "fcntl.flock(open(os.__file__), fcntl.LOCK_EX); effect()",
    "lock a record of a readable file": "fcntl.lockf(open(os.__file__), fcntl.LOCK_SH); effect()",
    "lease on a readable file": "fcntl.fcntl(os.open(os.__file__, 0), 1024, fcntl.F_RDLCK); effect()",
    "watch a folder": "call((294, 26), 0); effect()",
    "signal when a folder changes": "fcntl.fcntl(os.open('.', 0), 1026, 2); effect()",
    "fanotify": "refused((300, 262), -1, -1)",
    "device's memory": "open('/dev/mem', 'rb').read(1); effect()",
}

DISK = {
    "fallocate beyond the size": """
f = os.open('a', os.O_RDWR | os.O_CREAT)
call((285, 47), f, 1, 0, 1 << 30); effect()
""",
    "many files without a name": """
held = []
while len(held) < 8:
    held.append(os.open('a', os.O_RDWR | os.O_CREAT | os.O_TRUNC)); os.unlink('a')
    for _ in range(15): os.write(held[-1], bytes(1 << 19))
time.sleep(30); effect()
""",
    "many mapped files without a name": """
held = []
for _ in range(8):
    f = os.open('a', os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for _ in range(15): os.write(f, bytes(1 << 19))
    held.append(mmap.mmap(f, 4096)); os.unlink('a')
    for each in range(3, 64):
        try: os.close(each)
        except OSError: pass
time.sleep(30); effect()
""",
    "many files": """
for n in range(60):
    with open(f'f{n}', 'wb') as f: f.write(bytes(1 << 20))
time.sleep(30); effect()
""",
    "one large file": "open('a', 'wb').write(bytes(100 << 20)); effect()",
    "endless names": "n = 0\nwhile n < 10**5: open(f'f{n}', 'w').close(); n += 1\ntime.sleep(30); effect()",
}

PROCESSES = {
    "kill the parent": "os.kill(PARENT, 9); effect()",
    "kill a process": "os.kill(VICTIM, 9); effect()",
    "kill its own group": "os.kill(0, signal.SIGCONT); effect()",
    "kill everybody": "refused((62, 129), -1, 0)",
    "tgkill": "call((234, 131), VICTIM, VICTIM, 9); effect()",
    "tkill": "call((200, 130), VICTIM, 9); effect()",
    "signal when a pipe has data": """
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETOWN, VICTIM); fcntl.fcntl(r, 10, 9)
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK); os.write(w, b'x'); effect()
""",
    "signal the parent when a pipe has data": """
r, w = os.pipe()
for act in (lambda: fcntl.fcntl(r, fcntl.F_SETOWN, PARENT), lambda: fcntl.fcntl(r, 10, 9)):
    try: act()
    except OSError: pass
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK); os.write(w, b'x'); effect()
""",
    "owner of a pipe by structure": "fcntl.fcntl(os.pipe()[0], 15, struct.pack('ii', 1, VICTIM)); effect()",
    "owner of a socket by ioctl": "fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', VICTIM)); effect()",
    "asynchronous by ioctl": "fcntl.ioctl(os.pipe()[0], 0x5452, struct.pack('i', 1)); effect()",
    "rt_sigqueueinfo": "refused((129, 138), VICTIM, 0, 0)",
    "pidfd_open": "call((434, 434), VICTIM, 0); effect()",
    "pidfd_send_signal": "refused((424, 424), -1, 0, 0, 0)",
    "pidfd_getfd": "refused((438, 438), -1, 0, 0)",
    "ptrace": "refused((101, 117), 16, VICTIM, 0, 0)",
    "be traced": "refused((101, 117), 0, 0, 0, 0)",
    "read another's memory": "refused((310, 270), VICTIM, 0, 0, 0, 0, 0)",
    "write another's memory": "refused((311, 271), VICTIM, 0, 0, 0, 0, 0)",
    "memory of the parent": "open(f'/proc/{PARENT}/mem', 'rb'); effect()",
    "environment of the parent": "open(f'/proc/{PARENT}/environ', 'rb').read(); effect()",
    "root of another": "open(f'/proc/{VICTIM}/root' + SECRET).read(); effect()",
    "oom_score_adj of another": "open(f'/proc/{VICTIM}/oom_score_adj', 'w').write('1000'); effect()",
    "affinity of another": "os.sched_setaffinity(VICTIM, {0}); effect()",
    "affinity of the parent": "os.sched_setaffinity(PARENT, {0}); effect()",
    "priority of another": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19); effect()",
    "priority of the parent": "os.setpriority(os.PRIO_PROCESS, PARENT, 19); effect()",
    "priority of its own group": "os.setpriority(os.PRIO_PGRP, 0, 19); effect()",
    "priority of the user": "refused((141, 140), 3, 0, 19)",
    "scheduler of another": "os.sched_setscheduler(VICTIM, os.SCHED_IDLE, os.sched_param(0)); effect()",
    "scheduler of the parent": "os.sched_setscheduler(PARENT, os.SCHED_IDLE, os.sched_param(0)); effect()",
    "ioprio of the parent": "call((251, 30), 1, PARENT, 3 << 13); effect()",
    "limits of the parent": "resource.prlimit(PARENT, resource.RLIMIT_NOFILE, (3, 3)); effect()",
    "ioprio of another": "call((251, 30), 1, VICTIM, 3 << 13); effect()",
    "limits of another": "resource.prlimit(VICTIM, resource.RLIMIT_NOFILE, (3, 3)); effect()",
    "its own limits": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); effect()",
    "advice on another's memory": "refused((440, 440), -1, 0, 0, 0, 0)",
    "memory of an ended process": "refused((448, 448), -1, 0)",
    "timer that signals a thread": "refused((222, 107), 0, 0, 0)",
    "pages of another": "refused((256, 238), VICTIM, 0, 0, 0)",
    "kcmp": "refused((312, 272), VICTIM, VICTIM, 0, 0, 0)",
    "outlive the parent": "call((157, 167), 1, 0, 0, 0, 0); effect()",
    "session of its own": "os.setsid(); effect()",
    "process group of its own": "os.setpgid(0, 0); effect()",
}

BOMBS = {
    "fork": "os.fork() or os._exit(0); effect()",
    "vfork": "refused((58, 220), 0x4111, 0, 0, 0, 0)",
    "clone without threads": "refused((56, 220), 17, 0, 0, 0, 0)",
    "clone with a namespace": "refused((56, 220), 0x10000000 | 17, 0, 0, 0, 0)",
    "a thread with files of its own": "refused((56, 220), 0x3d0f00 & ~0x400, 0, 0, 0, 0)",
    "clone3": "refused((435, 435), 0, 0)",
    "posix_spawn": "os.posix_spawn('/bin/true', ['true'], {}); effect()",
    "execve": "os.execv(sys.executable, ['python']); effect()",
    "execveat": "refused((322, 281), -1, 0, 0, 0, 0)",
    "memfd": "os.memfd_create('x'); effect()",
    "memfd_secret": "refused((447, 447), -1)",
    "an executable of its own": """
open('mine', 'wb').write(open(os.path.realpath(sys.executable), 'rb').read(4096)); os.chmod('mine', 0o700); effect()
""",
    "threads": """
A = ctypes.create_string_buffer(64); L.pthread_attr_init(A)
L.pthread_attr_setstacksize(A, ctypes.c_size_t(16384))
L.pthread_create.argtypes = [ctypes.c_void_p] * 4
made, t, body = 0, ctypes.c_ulong(), ctypes.cast(L.pause, ctypes.c_void_p)
while made < 4000 and not L.pthread_create(ctypes.addressof(t), ctypes.addressof(A), body, None): made += 1
if made > 100: time.sleep(30); effect()
""",
    "memory": "held = []\nwhile len(held) < 1024: held.append(bytearray(b'x' * (1 << 20)))\neffect()",
    "mapped memory": "m = mmap.mmap(-1, 1 << 30); effect()",
    "huge pages": "mmap.mmap(-1, 2 << 20, flags=0x40022); effect()",
    "locked memory": "call((149, 228), 0, 4096); effect()",
    "System V memory": "call((29, 194), KEY, 4096, 0o1600); effect()",
    "System V queue": "call((68, 186), KEY, 0o1600); effect()",
    "System V semaphores": "call((64, 190), KEY, 1, 0o1600); effect()",
    "POSIX queue": "call((240, 180), b'laminar-attack', 0o102, 0o600, 0); effect()",
    "descriptors": "held = []\nwhile len(held) < 500: held.append(os.pipe())\neffect()",
    "large pipes": "fcntl.fcntl(os.pipe()[0], 1031, 1 << 20); effect()",
    "output": "while True: os.write(1, b'x' * 4096)",
    "errors": "while True: os.write(2, b'x' * 4096)",
}

SOCKETS = {
    "connect": "socket.create_connection(('127.0.0.1', PORT), 1); effect()",
    "datagram to a path": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', PATH); effect()",
    "datagram to a name": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', NAME); effect()",
    "stream to a path": "socket.socketpair()[0].sendto(b'x', PATH); effect()",
    "message to a name": "socket.socketpair()[0].sendmsg([b'x'], [], 0, NAME); effect()",
    "bind a name": "socket.socketpair()[0].bind('\\0laminar-attack-inside'); effect()",
    "packets": "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); effect()",
    "reconnect a pair": "socket.socketpair()[0].connect(PATH); effect()",
    "pass a descriptor": """
a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [0]); effect()
""",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); effect()",
    "raw packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); effect()",
    "virtual machine's host": "socket.socket(40, socket.SOCK_STREAM); effect()",
}

KERNEL = {
    "io_uring": "call((425, 425), 4, ctypes.create_string_buffer(256)); effect()",
    "userfaultfd": "call((323, 282), 1); effect()",
    "bpf": "refused((321, 280), 0, 0, 0)",
    "perf": "refused((298, 241), 0, 0, -1, -1, 0)",
    "key": "call((248, 217), b'user', b'laminar-attack', b'x', 1, -4); effect()",
    "keyring": "call((250, 219), 1, b'laminar-attack'); effect()",
    "requested key": "refused((249, 218), 0, 0, 0, 0)",
    "clock": "refused((227, 112), 0, 0)",
    "time of day": "refused((164, 170), 1, 0)",
    "adjtimex": "refused((159, 171), 0)",
    "user namespace": "refused((272, 97), 0x10000000)",
    "mount namespace": "refused((272, 97), 0x00020000)",
    "setns": "refused((308, 268), -1, 0)",
    "mount": "refused((165, 40), 0, 0, 0, 0, 0)",
    "umount": "refused((166, 39), 0, 0)",
    "mounts by their ids": "refused((458, 458), 0, 0, 0, 0)",
    "new mount": "refused((430, 430), 0, 0)",
    "chroot": "refused((161, 51), 0)",
    "pivot_root": "refused((155, 41), 0, 0)",
    "swap": "refused((167, 224), 0, 0)",
    "accounting": "refused((163, 89), 1)",
    "module": "refused((175, 105), 0, 0, 0)",
    "kexec": "refused((246, 104), 0, 17, 0, 0)",
    "reboot": "refused((169, 142), 0, 0, 0, 0)",
    "log": "refused((103, 116), 10, 0, 0)",
    "quota": "refused((179, 60), 0, 0, 0, 0)",
    "host name": "refused((170, 161), 0, 9999)",
    "sync of all": "refused((162, 81), 0)",
    "splice": "refused((275, 76), -1, 0, -1, 0, 0, 0)",
    "page cache of others": "refused((27, 232), 0, 0, 0)",
    "personality": "refused((135, 92), 0xffffffff)",
    "seccomp again": "refused((317, 277), 0, 0, 0)",
    "Landlock again": "refused((444, 444), 0, 0, 1)",
    "capabilities": "refused((126, 91), 0, 0)",
    "another user": "os.setuid(os.getuid()); effect()",
    "type into a terminal": "fcntl.ioctl(0, 0x5412, b'x'); effect()",
    "terminal": "fcntl.ioctl(os.open('/dev/tty', os.O_RDWR), 0x5412, b'x'); effect()",
    "terminal of its own": "os.openpty(); effect()",
    "flags of a file": "f = open('a', 'w'); fcntl.ioctl(f, 0x40086602, struct.pack('l', 16)); effect()",
    "the other half of x86-64's calls": "refused((0x40000000 + 57, 0x40000000 + 57))",
    "calls of a 32-bit program": """
if ARM: raise SystemExit(1)
m = mmap.mmap(-1, 4096, prot=7); m.write(bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3]))  # getpid by int 0x80
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))(); effect()
""",
}

TIME = {
    "never end": "while True: pass",
    "sleep": "time.sleep(600)",
    "ignore every signal": """
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True: pass
""",
    "close everything": "os.closerange(0, 64)\nwhile True: time.sleep(1)",
    "stop": "os.kill(os.getpid(), signal.SIGSTOP)\nwhile True: time.sleep(1)",
    "threads that stay": "[threading.Thread(target=time.sleep, args=(600,)).start() for _ in range(5)]",
    "at the exit": "import atexit; atexit.register(time.sleep, 600)",
    "no exit": "os._exit = lambda status: time.sleep(600)",
}

ANSWERS = {
    "frames": """
frame = sys._getframe()
while frame:
    text = repr(frame.f_locals) + repr(frame.f_code.co_consts)
    if 'TOKEN-' in text: print(text[text.index('TOKEN-'):][:38])
    frame = frame.f_back
""",
    "all objects": """
import gc
for each in gc.get_objects():
    if isinstance(each, (dict, list, tuple)):
        for part in (each.values() if isinstance(each, dict) else each):
            if type(part) in (str, bytes) and 'TOKEN' + '-' in str(part): print(str(part)[:38])
""",
    "its own memory": """
needle = b'TOKEN' + b'-'
heap = L.sbrk(0)
with open('/proc/self/mem', 'rb') as memory: memory.seek(heap - 4096); print(memory.read(4096).partition(needle))
""",
    "descriptors": """
for each in range(3, 64):
    try: os.set_blocking(each, False); print(os.read(each, 4096).decode())
    except OSError: pass
""",
    "arguments and environment": "print(sys.argv, dict(os.environ)); print(open('/proc/self/cmdline').read())",
    "files of the verifier": """
for folder in ('/tmp', '.', '..', OUTSIDE):
    try: print([open(os.path.join(folder, each)).read() for each in os.listdir(folder)])
    except OSError: pass
""",
    "an early success": "print(end=''); os._exit(0)",
}

ATTACKS = {
    f"{kind}: {name}": program
    for kind, programs in {
        "files": FILES, "disk": DISK, "processes": PROCESSES, "bombs": BOMBS, "sockets": SOCKETS, "kernel": KERNEL,
        "time": TIME, "answers": ANSWERS,
    }.items()
    for name, program in programs.items()
}  # fmt: skip
