"""SGLang for tests: the real server where SGLANG_VENV names an environment that has it, and one that answers badly.

``SGLANG_VENV`` is a virtual environment with SGLang, in which it runs on this machine. Without a GPU that takes
stand-ins for two CUDA-only packages, and the arguments below.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from aiohttp import web

from workers.generation.server.loader import LoadResult, result_numbers

VENV = os.environ.get("SGLANG_VENV", "")
ON_CPU = shlex.split(
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule "
    "--disable-cuda-graph --mem-fraction-static 0.5 --grammar-backend none --sleep-on-idle --log-level-http warning"
)

needs_sglang = pytest.mark.skipif(not VENV, reason="SGLANG_VENV does not name an environment with SGLang in it")


def command(*arguments: str, max_total_tokens: int = 16384) -> tuple[str, ...]:
    """How to start the real server; the engine adds the model, the port and what it needs."""
    python = str(Path(VENV) / "bin" / "python")
    launch = ["env", "HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1", python, "-m", "sglang.launch_server"]
    if not torch.cuda.is_available():
        launch[1:1] = ["SGLANG_USE_CPU_ENGINE=1"]
        launch += ON_CPU
    return (*launch, "--max-total-tokens", str(max_total_tokens), *arguments)


class FakeServer:
    """Says what a healthy SGLang says, except for what a test replaces: ``server.answers["/generate"] = ...``.

    asked: paths in the order of their requests.  key: without which it says nothing but how it is.
    """

    def __init__(self, key: str = "key-of-the-fake") -> None:
        self.asked: list[str] = []
        self.key = key
        self.url = ""
        self.label = "default"
        self.answers: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        if request.path != "/health" and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path in self.answers:
            return await self.answers[request.path](request)
        match request.path:
            case "/model_info":
                return web.json_response({"model_path": "m", "model_type": "qwen3", "weight_version": self.label})
            case "/server_info":
                return web.json_response(
                    {
                        "version": "0.5.23",
                        "max_total_num_tokens": 4096,
                        "max_running_requests": 4,
                        "custom_weight_loader": ["workers.generation.server.loader.load_into_sglang"],
                    }
                )
            case "/get_weights_by_name":
                number = int((await request.json())["name"].rpartition(":")[2])
                return web.json_response(list(b"\x81\xa6number" + bytes([number])))
            case "/update_weights_from_tensor":
                self.label = (await request.json())["weight_version"] or self.label
                return web.json_response({})
            case "/update_weight_version":
                self.label = (await request.json())["new_version"]
                return web.json_response({})
            case "/v1/loads":
                return web.json_response({"loads": [{"num_running_reqs": 1, "token_usage": 0.25}]})
            case "/generate":
                return await self.generate(request)
            case _:
                return web.json_response({})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Token 7 as often as was asked for, in one chunk."""
        body = await request.json()
        return await events(request, self.sample(body["sampling_params"]["max_new_tokens"]))

    def sample(self, count: int) -> dict[str, object]:
        """The last chunk of a sample of ``count`` tokens."""
        meta = {
            "finish_reason": {"type": "length"},
            "weight_versions": [{"version": self.label, "start": 0, "end": count}],
            "output_token_logprobs": [[-0.5, 7, None]] * count,
        }
        return {"output_ids": [7] * count, "meta_info": meta}


def says(body: object) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """An answer: always ``body``."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response(body)

    return answer


def loader_says(
    error: str, *, mismatch: bool = False, spoiled: bool = False
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """An answer to ``/get_weights_by_name``: how the last load went."""

    async def answer(request: web.Request) -> web.StreamResponse:
        number = int((await request.json())["name"].rpartition(":")[2])
        outcome = LoadResult(number=number, error=error, mismatch=mismatch, spoiled=spoiled)
        return web.json_response(result_numbers(outcome))

    return answer


async def events(request: web.Request, *chunks: object) -> web.StreamResponse:
    """Server-sent events, as SGLang sends them."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in chunks:
        text = chunk if isinstance(chunk, bytes) else web.json_response(chunk).body
        assert isinstance(text, bytes)
        await response.write(b"data: " + text + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def own_command() -> tuple[str, ...]:
    """How a worker starts the fake as a server of its own; it finds its key as the real ones do."""
    return (sys.executable, "-m", "tests.fakes.sglang_servers")


def key_of(options: dict[str, str]) -> str:
    """Of a server that was started so."""
    config = Path(options["--config"]).read_text() if "--config" in options else ""
    kept = re.search(r'^api-key: "(.+)"$', config, re.MULTILINE)
    return kept[1] if kept else os.environ["VLLM_API_KEY"]


async def serve_own(options: dict[str, str], key: str) -> None:
    """Serve until killed."""
    runner = web.AppRunner(app_of(FakeServer(key)))
    await runner.setup()
    if "--uds" in options:
        await web.UnixSite(runner, options["--uds"]).start()
    else:
        await web.TCPSite(runner, options["--host"], int(options["--port"])).start()
    await asyncio.Event().wait()


def app_of(server: FakeServer) -> web.Application:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    return app


@asynccontextmanager
async def fake_server(port: int = 0) -> AsyncIterator[FakeServer]:
    """port: 0 for a free one."""
    server = FakeServer()
    async with serving_app(app_of(server), port) as server.url:
        yield server


@asynccontextmanager
async def serving_app(app: web.Application, port: int = 0) -> AsyncIterator[str]:
    """Gives its URL. port: 0 for a free one."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just given up
        sock.bind(("127.0.0.1", port))
        await web.SockSite(runner, sock).start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            await runner.cleanup()


if __name__ == "__main__":
    started_with = dict(pairwise(sys.argv[1:]))
    asyncio.run(serve_own(started_with, key_of(started_with)))
