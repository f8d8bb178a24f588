"""Filters of system calls, as programs of seccomp: what a process in a jail may not ask of the kernel.

    child_filter     of every jail: sockets of other families than Unix's and the internet's (a network namespace does
                     not hold AF_VSOCK), and what reaches the kernel's own programs and keys
    answer_filter    of a model's code: also a second process, another program, other processes' memory and limits, and
                     memory that no process is charged with (pipes that hold huge pages, memfd, System V)

Source: linux/seccomp.h and linux/filter.h; numbers of calls: asm/unistd.h of both architectures.
"""

from __future__ import annotations

import platform
import socket
import struct
import sys

_CHILDS: dict[str, tuple[int, int]] = {  # refused in every jail; (x86_64, aarch64), -1: not there
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),  # opens sockets past this filter
}
_ANSWERS: dict[str, tuple[int, int]] = {  # refused to a model's code, too
    "fork": (57, -1),
    "vfork": (58, -1),
    "execve": (59, 221),
    "execveat": (322, 281),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "personality": (135, 92),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "mount": (165, 40),
    "unshare": (272, 97),
    "setns": (308, 268),
}
_SOCKETS = {"socket": (41, 198), "socketpair": (53, 199)}
_CLONE, _CLONE3, _PRLIMIT, _MADVISE, _FCNTL = (56, 220), (435, 435), (302, 261), (28, 233), (72, 25)
_CLONE_THREAD = 0x10000
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_F_SETPIPE_SZ = 1031
_X32 = 0x40000000
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

Instruction = tuple[int, int, int, int]
"""struct sock_filter: code, instructions to skip if so, if not, operand."""
_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW: Instruction = (_RETURN, 0, 0, 0x7FFF0000)
_REFUSE: Instruction = (_RETURN, 0, 0, 0x00050001)
"""The call fails with EPERM."""
_ABSENT: Instruction = (_RETURN, 0, 0, 0x00050026)
"""The call fails with ENOSYS, upon which the C library takes an older one."""
_KILL: Instruction = (_RETURN, 0, 0, 0x80000000)
"""A call by the numbers of another architecture ends the process."""


def child_filter(machine: str | None = None) -> bytes:
    """The filter of any jail as struct sock_filter[]; b"" for a processor whose numbers are not known."""
    return _program(machine, _CHILDS, (socket.AF_UNIX, socket.AF_INET))


def answer_filter(machine: str | None = None) -> bytes:
    """The filter of a model's code as struct sock_filter[]; b"" for a processor whose numbers are not known."""
    return _program(machine, _CHILDS | _ANSWERS, (socket.AF_UNIX,), is_answer=True)


def _program(
    machine: str | None, refused: dict[str, tuple[int, int]], families: tuple[int, ...], *, is_answer: bool = False
) -> bytes:
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES or sys.maxsize < 2**32:
        return b""
    column, architecture = _ARCHITECTURES[machine]
    program = [_load(4), (_EQUAL, 1, 0, architecture), _KILL, _load(0), (_AT_LEAST, 0, 1, _X32), _REFUSE]
    for number in (one[column] for one in refused.values()):
        program += _rule(number, _REFUSE)
    for number in (one[column] for one in _SOCKETS.values()):
        program += _rule(number, *_only(0, families))
    if is_answer:
        program += _rule(_CLONE[column], _argument(0), (_HAS_BIT, 0, 1, _CLONE_THREAD), _ALLOW, _REFUSE)
        program += _rule(_CLONE3[column], _ABSENT)  # its flags are in memory
        program += _rule(_PRLIMIT[column], *_only(0, (0,)))  # whose limits: 0 is the process itself
        program += _rule(_MADVISE[column], *_none_of(2, (_MADV_HUGEPAGE, _MADV_COLLAPSE)))
        program += _rule(_FCNTL[column], *_none_of(1, (_F_SETPIPE_SZ,)))  # pipes' memory is counted by user
    return b"".join(struct.pack("=HBBI", *one) for one in (*program, _ALLOW))


def _load(offset: int) -> Instruction:
    """Load 4 bytes of struct seccomp_data."""
    return (_LOAD, 0, 0, offset)


def _argument(index: int) -> Instruction:
    """The lower half of an argument of the call."""
    return _load(16 + 8 * index)


def _rule(number: int, *body: Instruction) -> list[Instruction]:
    """``body``, which returns, for the call ``number``; number: -1 for one that this architecture does not have."""
    return [] if number < 0 else [(_EQUAL, 0, len(body), number), *body]


def _only(index: int, allowed: tuple[int, ...]) -> list[Instruction]:
    tests: list[Instruction] = [(_EQUAL, len(allowed) - place, 0, one) for place, one in enumerate(allowed)]
    return [_argument(index), *tests, _REFUSE, _ALLOW]


def _none_of(index: int, refused: tuple[int, ...]) -> list[Instruction]:
    tests: list[Instruction] = [(_EQUAL, len(refused) - place, 0, one) for place, one in enumerate(refused)]
    return [_argument(index), *tests, _ALLOW, _REFUSE]
