"""Status codes: the CPU kernels, which cannot read Python's list, have the same one."""

from __future__ import annotations

import re
from pathlib import Path

from quire.kernels import cpu
from quire.types import status


def test_the_cpu_kernels_have_the_same_codes() -> None:
    source = (Path(cpu.__file__).parent / "step.cpp").read_text(encoding="utf-8")
    (names,) = re.findall(r"enum Status \{ ([A-Z_, ]+) \}", source)
    codes = {name: value for name, value in vars(status).items() if type(value) is int}
    assert dict(zip(names.split(", "), range(len(codes)), strict=True)) == codes
    assert status.MESSAGES.keys() == set(codes.values()) - {status.OK}
