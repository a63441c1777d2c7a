"""`quire embed FILE.jsonl --out vectors.npy`: a vector of each line's text, in a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.args import add_engine_arguments, engine_settings_from

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEFAULT_EMBEDDER = "minilm"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="a JSON text, or an object with one, in each line")
    add("--out", type=Path, required=True, metavar="OUT", help="where the vectors go: .npy or .parquet")
    add("--field", default="text", metavar="NAME", help="of objects: which field is the text; default %(default)s")
    add("--dimensions", type=int, metavar="N", help="keep only this many of a vector's first values")
    add("--prompt-name", metavar="NAME", help="which of the model's own texts is put before each text")
    add("--batch-size", type=int, default=1024, metavar="N", help="texts between two saves; default %(default)s")
    add_engine_arguments(parser, positional=False, model=DEFAULT_EMBEDDER)


def run(args: argparse.Namespace) -> int:
    from quire.frontend.embed_file import EmbedJob, embed_file

    settings = {"model": DEFAULT_EMBEDDER, **engine_settings_from(args)}
    how = {"model": settings["model"], "dimensions": args.dimensions, "prompt_name": args.prompt_name}
    job = EmbedJob(args.file, args.out, args.field, how, args.batch_size)
    job.check()
    import numpy as np

    from quire import LLM, PoolingParams  # after the arguments are known to be good: this import is slow

    params = PoolingParams(task="embed", dimensions=args.dimensions, truncate_prompt_tokens=-1)
    with LLM(**settings) as llm:
        longest, cut = llm.max_model_len, 0

        def embed(texts: list[str]) -> NDArray[np.float32]:
            nonlocal cut
            found = llm.encode(texts, params, use_tqdm=False, prompt_name=args.prompt_name)
            cut += sum(len(output.prompt_token_ids) >= longest for output in found)
            return np.stack([output.outputs.data for output in found])

        count, earlier = embed_file(job, embed)
    told = f"wrote {count} vectors to {args.out}"
    told += f"; {earlier} of them are of an earlier run" if earlier else ""
    told += f"; {cut} texts were cut to {longest} tokens" if cut else ""
    print(told, file=sys.stderr)
    return 0
