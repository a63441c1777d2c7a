"""`quire top [SERVER]`: a server at work, in the terminal: load, latencies, and what each request waits for."""

from __future__ import annotations

import argparse
import select
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quire.cli.stop import choose_server
from quire.cli.top_feed import Frame, Percentiles, Request, Server
from quire.config import env
from quire.config.groups import ServerConfig
from quire.server.state import running_servers

if TYPE_CHECKING:
    from rich.console import RenderableType

_SPARKS = " ▁▂▃▄▅▆▇█"
_HISTORY = 60
_MOST_REQUESTS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "server", nargs="?", metavar="SERVER", help="an address, or a server of `quire ps`; absent: the only one"
    )
    parser.add_argument("--api-key", metavar="TEXT", help="the server's key; else the first of QUIRE_API_KEY")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks at metrics. Default: 1."
    )
    parser.add_argument("--once", action="store_true", help="print what is now, and exit; so without a terminal")


def run(args: argparse.Namespace) -> int:
    server = Server(address_of(args.server), args.api_key or next(iter(env.api_keys()), None))
    history: deque[float] = deque(maxlen=_HISTORY)
    frames = server.frames(max(0.1, args.interval))
    from rich.console import Console

    console = Console()
    if args.once or not sys.stdout.isatty():
        console.print(picture(server.address, next(frames), history, console.height))
        return 0
    from rich.live import Live

    with single_keys() as is_left, Live(console=console, screen=True, auto_refresh=False) as live:
        for frame in frames:
            history.append(frame.load.generation_rate)
            live.update(picture(server.address, frame, history, console.height), refresh=True)
            if is_left():
                break
    return 0


def address_of(name: str | None) -> str:
    """Where the server is: as given, as `quire ps` knows it, or where a server is by default."""
    if name is not None and (name.startswith("unix:") or "://" in name):
        return name.rstrip("/")
    if name is not None or running_servers():
        return choose_server(name).address
    return f"http://{ServerConfig.host}:{ServerConfig.port}"


def picture(address: str, frame: Frame, history: deque[float], height: int) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    load = frame.load
    head = Text.assemble(
        (" quire top ", "reverse"),
        f" {address}  ",
        (frame.status, "green" if frame.status == "ready" else "yellow"),
        f"  {frame.detail}" if frame.status != "ready" else "",
        "  q leaves",
    )
    hits = f"{load.prefix_hits / load.prefix_queries:.0%}" if load.prefix_queries else "-"
    numbers = Table.grid(padding=(0, 2))
    numbers.add_row("tokens/s", f"{load.generation_rate:.1f}", sparkline(history), "")
    numbers.add_row("prompt tokens/s", f"{load.prompt_rate:.1f}", "prefix hits", hits)
    numbers.add_row("running", str(load.running), "waiting", str(load.waiting))
    numbers.add_row("KV blocks", f"{load.kv_usage:.0%}", bar(load.kv_usage), "")
    numbers.add_row("TTFT, p50 / 90 / 99", shown(load.ttft), "ITL, p50 / 90 / 99", shown(load.itl))
    numbers.add_row(
        "finished", str(load.finished), f"preemptions {load.preemptions}", f"restarts {load.num_restarts}"
    )
    parts: list[RenderableType] = [head, "", numbers]
    requests = [] if frame.engine is None else frame.engine.requests
    lines = [(letter, text) for _, letter, text in frame.log[-3:]]
    room = max(1, height - 12 - len(lines))
    if requests:
        parts += ["", request_table(requests[:_MOST_REQUESTS], frame.at, room)]
    parts += [Text(f"{letter} {text}", style="dim", no_wrap=True, overflow="ellipsis") for letter, text in lines]
    return Group(*parts)


def request_table(requests: list[Request], now: float, room: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("request", "phase", "age", "prompt", "output", "cached", "blocks", "waits for"):
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    for request in requests[: room - 1]:
        table.add_row(
            Text(request.id[-20:]),
            phase_of(request),
            f"{max(0.0, now - request.since):.1f} s",
            f"{request.num_prompt_tokens:,}",
            f"{request.num_tokens - request.num_prompt_tokens:,}",
            "" if request.num_cached < 0 else f"{request.num_cached:,}",
            str(request.num_blocks),
            Text(request.why),
        )
    if len(requests) > room - 1:
        table.add_row(f"and {len(requests) - room + 1} more")
    return table


def phase_of(request: Request) -> str:
    if request.phase == "prefill":
        return f"prefill {request.num_computed:,} of {request.num_prompt_tokens:,}"
    return request.phase


def shown(latency: Percentiles) -> str:
    """Half, 90 % and 99 % of them are at most so long."""
    values = [latency.p50, latency.p90, latency.p99]
    if None in values:
        return "-"
    return " / ".join(f"{1000 * value:.0f}" for value in values if value is not None) + " ms"


def bar(share: float, width: int = 24) -> str:
    filled = round(min(1.0, max(0.0, share)) * width)
    return "█" * filled + "░" * (width - filled)


def sparkline(values: deque[float]) -> str:
    most = max(values, default=0.0) or 1.0
    return "".join(_SPARKS[round(value / most * (len(_SPARKS) - 1))] for value in values)


class _Keys:
    def __call__(self) -> bool:
        """Whether q was pressed."""
        while select.select([sys.stdin], [], [], 0)[0]:
            if sys.stdin.read(1) in ("q", "Q", ""):
                return True
        return False


@contextmanager
def single_keys() -> Iterator[_Keys]:
    """Keys are read without waiting for the end of a line."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield _Keys()
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _Keys()
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
