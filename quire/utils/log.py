"""One logging set-up for the whole program. It knows no settings: the caller passes the level."""

from __future__ import annotations

import logging

ROOT_NAME = "quire"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_FORMAT = "%(asctime)s %(levelname).1s %(message)s"
_FORMAT_DEBUG = "%(asctime)s.%(msecs)03d %(levelname).1s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def setup_logging(level: str) -> None:
    """Send Quire's messages to stderr from `level` on. The first call decides; later ones change nothing.

    An application that set up logging itself keeps it: its handlers get the messages, and no other is added.
    """
    logger = logging.getLogger(ROOT_NAME)
    if logger.level != logging.NOTSET:
        return
    known = level.upper() in LEVELS
    logger.setLevel(level.upper() if known else "INFO")
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        debug = logger.level == logging.DEBUG
        handler.setFormatter(logging.Formatter(_FORMAT_DEBUG if debug else _FORMAT, datefmt="%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
    if not known:
        logger.warning("log level %s is unknown, using INFO; known: %s", level, ", ".join(LEVELS))
