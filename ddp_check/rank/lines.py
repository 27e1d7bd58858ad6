"""Which lines of the script run, in this rank and in the workers of its loaders."""

import os
import sys
import threading
import types


class Lines:
    """Collects the numbers of lines in a file, which forked processes write to, too."""

    def __init__(self, code, path):
        self.name = code.co_filename
        self.every = sorted(lines_in(code))
        self.ran = set()
        self.path = path
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        sys.settrace(self.trace_function)
        threading.settrace(self.trace_function)

    def trace_function(self, frame, event, argument):
        if frame.f_code.co_filename != self.name:
            return None
        return self.trace_line(frame, event, argument)

    def trace_line(self, frame, event, argument):
        if frame.f_lineno not in self.ran:
            self.ran.add(frame.f_lineno)
            os.write(self.file, f"{frame.f_lineno}\n".encode())
        return self.trace_line

    def take(self):
        """The lines that have run, and all lines with code."""
        sys.settrace(None)
        threading.settrace(None)
        return sorted(set(map(int, self.path.read_text().split()))), self.every


def lines_in(code):
    lines = {line for _, _, line in code.co_lines() if line}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            lines |= lines_in(constant)
    return lines
