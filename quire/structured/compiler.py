"""GrammarCompiler: compiles each grammar once, beside the engine's loop and within a time limit. Knows no request."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from quire.structured.base import Backend, Grammar
from quire.structured.registry import BACKENDS
from quire.types.structured import GrammarError, GrammarLimits, GrammarSource, Vocabulary
from quire.utils.log import get_logger

logger = get_logger(__name__)

# A compilation that is over its time cannot be interrupted; the other threads go on meanwhile.
_THREADS = 4


class GrammarCompiler:
    """`compile` may be called on one thread; what it returns is completed on others."""

    def __init__(self, limits: GrammarLimits, cache_size: int = 128) -> None:
        self._limits = limits
        self._cache_size = cache_size
        self._cache: OrderedDict[bytes, Future[Grammar]] = OrderedDict()  # the newest at the end
        self._pool: ThreadPoolExecutor | None = None
        self._backend: Future[Backend] = Future()
        self._has_vocabulary = False

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Start to build the backend, once; until then nothing can be compiled."""
        if self._has_vocabulary:
            return
        self._has_vocabulary = True
        self._submit(self._build, vocabulary)

    def backend(self) -> Backend:
        """The backend, which exists as soon as anything has been compiled."""
        return self._backend.result(timeout=0)

    def compile(self, source: GrammarSource) -> Future[Grammar]:
        """The grammar, now or later; the future holds a GrammarError if the source is bad or takes too long."""
        key = source.key
        future = self._cache.get(key)
        if future is not None:
            self._cache.move_to_end(key)
            return future
        future = self._cache[key] = Future()
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        if self._has_vocabulary:
            self._submit(self._compile, source, future)
        else:
            future.set_exception(
                GrammarError("the engine was given a grammar before its vocabulary", "structured_outputs")
            )
        return future

    def shutdown(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, work: Callable[..., None], *arguments: object) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="quire-grammar")
        self._pool.submit(work, *arguments)

    def _build(self, vocabulary: Vocabulary) -> None:
        begin = time.monotonic()
        try:
            backend = BACKENDS.get(self._limits.backend)(vocabulary)
        except Exception as error:  # every grammar that waits for the backend fails with it
            logger.error("the structured output backend cannot be built", exc_info=error)
            self._backend.set_exception(error)
        else:
            logger.info(
                "%s ready for structured output in %.2f s (%d tokens)",
                self._limits.backend,
                time.monotonic() - begin,
                len(vocabulary.pieces),
            )
            self._backend.set_result(backend)

    def _compile(self, source: GrammarSource, future: Future[Grammar]) -> None:
        answer = _Once(future)
        try:
            backend = self._backend.result()
        except Exception as error:  # any failure there becomes the error of the request
            answer.fail(GrammarError(f"structured output is not available: {error}", "structured_outputs"))
            return
        timer = threading.Timer(self._limits.compile_timeout, answer.fail, [self._timed_out(source)])
        timer.daemon = True
        timer.start()
        begin = time.monotonic()
        try:
            answer.succeed(backend.compile(source))
        except GrammarError as error:
            answer.fail(error)
        except Exception as error:  # a bug in the library or in the backend must not lose the request
            logger.error("compiling a grammar failed", exc_info=error)
            answer.fail(GrammarError(f"the grammar cannot be compiled: {error}", f"structured_outputs.{source.kind}"))
        finally:
            timer.cancel()
            logger.debug("compiled a grammar (%s) in %.1f ms", source.kind, 1e3 * (time.monotonic() - begin))

    def _timed_out(self, source: GrammarSource) -> GrammarError:
        name = f"structured_outputs.{source.kind}"
        return GrammarError(
            f"{name} takes longer than {self._limits.compile_timeout:g} s to compile; make it simpler, or start the"
            " server with a larger --structured-outputs-compile-timeout",
            name,
        )


class _Once:
    """A future that two threads may try to complete: the first one does."""

    def __init__(self, future: Future[Grammar]) -> None:
        self._future = future
        self._lock = threading.Lock()

    def succeed(self, grammar: Grammar) -> None:
        with self._lock:
            if not self._future.done():
                self._future.set_result(grammar)

    def fail(self, error: GrammarError) -> None:
        with self._lock:
            if not self._future.done():
                self._future.set_exception(error)
