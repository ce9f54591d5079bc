"""How many files, and so connections, a process that listens may have open."""

import resource


def take_files(most: int = 1 << 20) -> int:
    """Has the system allow this process as many open files as it would, and no more than `most`. Returns how many that are."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
