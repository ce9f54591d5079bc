"""How many files, and so connections, a process that listens may have open."""

import resource


def raise_file_limit() -> int:
    """Takes all the file descriptors that the system allows this process. Returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(1 << 20, hard if hard != resource.RLIM_INFINITY else 1 << 20)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return soft
