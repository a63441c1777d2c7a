"""What the allocator of the host keeps, and that it can be given back."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

RESIDENT = """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
"""
GIVES_BACK = f"""
import torch
from quire.platform.allocator import return_free_memory
{RESIDENT}
kept = [torch.ones(1 << 14) for _ in range(1000)]
del kept[:-1]
before = resident()
return_free_memory()
assert before - resident() > 32 << 20, (before, resident())
"""
# After one large block glibc takes smaller ones from its heap, where the last one keeps those before it.
KEEPS_LITTLE = f"""
import sys
from quire.platform.allocator import keep_little_free_memory
{RESIDENT}
keep_little_free_memory()
assert "torch" not in sys.modules
large = bytearray(30 << 20)
del large
before = resident()
held = [bytearray(1 << 20) for _ in range(20)] + [bytearray(2000)]
del held[:-1]
assert resident() - before < 4 << 20, (before, resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators give memory back in their own ways")
@pytest.mark.parametrize("program", [GIVES_BACK, KEEPS_LITTLE], ids=["when told", "at once"])
def test_freed_memory_goes_back(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
