"""A script as somebody writes one."""


def go(time_s, pose):
    if time_s >= 1:
        raise StopIteration
    return [0.5, 0, 0, 1] if time_s < 0.5 else None


def broken(time_s, pose):
    return 1 / 0
