"""The process of a server: how it ends, and its exit status."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from types import FrameType

import uvicorn

from attnops_lm.serve.endpoints import application
from attnops_lm.serve.engine import Engine
from attnops_lm.serve.limits import NO_LIMITS, Limits

GRACE = 5  # seconds that connections have to end before the server does


class HTTPServer(uvicorn.Server):
    """uvicorn's server, except that it ends when its engine ends, and that a signal stops the engine first.

    The engine then ends all streams. Otherwise uvicorn would wait for open streams before it told the application to
    stop, while the streams waited for the engine.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends all requests; the second ends the process at once."""
        if self.should_exit:
            os._exit(128 + sig)
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Whether to end; uvicorn calls this ten times a second."""
        return await super().on_tick(counter) or self.engine.is_stopped

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End streams, then connections, then the engine's thread."""
        self.engine.stop()
        await super().shutdown(sockets)


def serve(
    engine: Engine,
    name: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_keys: Sequence[str] = (),
    limits: Limits = NO_LIMITS,
) -> int:
    """Serve until a signal comes or the engine fails.

    Args:
        engine: the engine; it is stopped at the end.
        name: the name of the model, for clients.
        host: the address to listen on.
        port: the port to listen on; 0 for any free one.
        api_keys: the keys with which ``/v1`` may be called; none: by anyone.
        limits: what one client may use, by its key, or by its address without keys.

    Returns:
        An exit status: 1 if the engine failed, else 0.

    Raises:
        ValueError: a key is empty, or has characters other than visible ASCII.
    """
    app = application(engine, name, api_keys, limits)
    config = uvicorn.Config(app, host=host, port=port, log_level="info", timeout_graceful_shutdown=GRACE)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises its signals again when it has ended
        HTTPServer(config, engine).run()
    return int(engine.failure is not None)
