"""What the allocator of the host keeps, and that it can be given back."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from quire.platform.host import return_free_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

kept = [torch.ones(1 << 14) for _ in range(1000)]
del kept[:-1]
before = resident()
return_free_memory()
assert before - resident() > 32 << 20, (before, resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators give memory back in their own ways")
def test_freed_memory_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
