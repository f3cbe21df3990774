"""A small completion server for one model, with a web page to type in. Needs the extra `serve`: pip install 'megalite[serve]'

    python tools/serve.py --load runs/shakespeare                      then open http://127.0.0.1:8000
    python tools/serve.py --load SmolLM2-135M --port 9000 --dtype bf16

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "Once upon a time", "max_tokens": 50, "temperature": 0.8, "stream": true}'

`/v1/completions` takes what OpenAI's takes (texts or token ids, n, stop, seed, echo, stream) and top_k, min_p and repetition_penalty;
`/v1/models` names the model. Requests wait in a queue and are computed one after another. A field that is wrong or unknown is answered with
400 and the reasons, a full queue with 429. There is no access control: --host other than the default shows the model to the network.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from megalite.errors import ConfigError, MegaliteError
from megalite.generation.engine import Engine, Event, Job, QueueFullError
from megalite.generation.page import PAGE
from megalite.generation.request import parse_request
from megalite.log import configure_logging

MOST_ROWS = 64
LARGEST_BODY = 4 * 2**20


class Completions:
    """The endpoint. most_tokens: new ones that one text may ask for; name: of the model, for answers."""

    def __init__(self, engine: Engine, name: str, most_tokens: int) -> None:
        self.engine, self.name, self.most_tokens = engine, name, most_tokens
        self.created = int(time.time())

    async def __call__(self, request: Any) -> Any:
        from starlette.responses import JSONResponse, StreamingResponse

        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        try:
            parsed = parse_request(await read_json(request), most_tokens=self.most_tokens, most_rows=MOST_ROWS)
            job = self.engine.prepare(parsed, lambda event: _tell(loop, events, event))
            self.engine.submit(job)
        except QueueFullError as error:
            return JSONResponse(error_body(str(error), "rate_limit_error"), status_code=429)
        except MegaliteError as error:
            return JSONResponse(error_body(str(error), "invalid_request_error"), status_code=400)
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": self.name}
        if parsed.stream:
            return StreamingResponse(self._stream(job, events, head), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        return await self._answer(request, job, events, head)

    async def _stream(self, job: Job, events: asyncio.Queue[Event], head: dict[str, Any]) -> AsyncIterator[str]:
        try:
            if job.request.echo:
                for row in range(len(job.rows)):
                    yield _sse({**head, "choices": [choice(row, self.engine.decode(job.rows[row]), None)]})
            async for event in _until_done(job, events):
                if event.row < 0:
                    yield _sse(error_body(event.text, "server_error"))
                    return
                yield _sse({**head, "choices": [choice(event.row, event.text, event.finish)]})
            yield "data: [DONE]\n\n"
        finally:
            job.is_cancelled.set()  # a client that has gone away; otherwise it is over already

    async def _answer(self, request: Any, job: Job, events: asyncio.Queue[Event], head: dict[str, Any]) -> Any:
        from starlette.responses import JSONResponse

        texts = [self.engine.decode(row) if job.request.echo else "" for row in job.rows]
        reasons: list[str | None] = [None] * len(texts)
        leaving = asyncio.create_task(_wait_for_leaving(request, job))
        try:
            async for event in _until_done(job, events):
                if event.row < 0:
                    return JSONResponse(error_body(event.text, "server_error"), status_code=500)
                texts[event.row] += event.text
                reasons[event.row] = event.finish
        finally:
            leaving.cancel()
        num_prompt = sum(map(len, job.rows[:: job.request.num_samples]))
        usage = {"prompt_tokens": num_prompt, "completion_tokens": job.num_new, "total_tokens": num_prompt + job.num_new}
        choices = [choice(row, text, reason) for row, (text, reason) in enumerate(zip(texts, reasons, strict=True))]
        return JSONResponse({**head, "choices": choices, "usage": usage})


async def read_json(request: Any) -> Any:
    """Raises ConfigError for a body that is too large or is not JSON."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > LARGEST_BODY:
            raise ConfigError(f"the body is larger than {LARGEST_BODY} bytes")
    try:
        return json.loads(body)
    except ValueError as error:
        raise ConfigError(f"the body is not JSON: {error}") from error


async def _until_done(job: Job, events: asyncio.Queue[Event]) -> AsyncIterator[Event]:
    """The events up to the last row's end, or to a failure."""
    left = len(job.rows)
    while left:
        event = await events.get()
        yield event
        left = 0 if event.row < 0 else left - (event.finish is not None)


async def _wait_for_leaving(request: Any, job: Job) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.5)
    job.is_cancelled.set()


def _tell(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Event], event: Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(events.put_nowait, event)


def choice(row: int, text: str, finish: str | None) -> dict[str, Any]:
    return {"index": row, "text": text, "logprobs": None, "finish_reason": finish}


def error_body(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _sse(message: dict[str, Any]) -> str:
    return f"data: {json.dumps(message, ensure_ascii=False)}\n\n"


def build_app(engine: Engine, name: str, most_tokens: int = 4096) -> Any:
    """The Starlette application."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, JSONResponse
    from starlette.routing import Route

    completions = Completions(engine, name, most_tokens)
    model = {"id": name, "object": "model", "created": completions.created, "owned_by": "megalite"}

    async def models(request: Any) -> Any:
        return JSONResponse({"object": "list", "data": [model]})

    async def page(request: Any) -> Any:
        return HTMLResponse(PAGE)

    async def complete(request: Any) -> Any:
        return await completions(request)

    routes = [Route("/", page), Route("/v1/models", models), Route("/v1/completions", complete, methods=["POST"])]
    return Starlette(routes=routes)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="a checkpoint, the --save folder of a run (its newest one), or a Hugging Face folder")
    add("--host", default="127.0.0.1", help="address to listen at (default: %(default)s, this machine only)")
    add("--port", type=int, default=8000, help="default: %(default)s")
    add("--max-tokens", type=int, default=4096, metavar="N", help="most new tokens of one text (default: %(default)s)")
    add("--max-waiting", type=int, default=64, metavar="N", help="most requests that wait (default: %(default)s)")
    add("--tokenizer-type", metavar="TYPE", help="bytes, chars, sentencepiece, hf or tiktoken (default: the run's)")
    add("--tokenizer-model", metavar="PATH", help="the tokenizer's file or folder (default: the run's)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA where there is one")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of weights: bf16 halves memory and time (default: %(default)s)")
    add("--int8-cache", action="store_true", help="keep keys and values as 8-bit integers: a quarter of the memory, and rounded")
    return parser


def load_engine(args: argparse.Namespace) -> Engine:
    """Raises MegaliteError subclasses and OSError."""
    import torch

    from megalite.convert import load_any
    from megalite.generation import load_tokenizer
    from megalite.training.launch import choose_device

    if args.max_tokens < 1 or args.max_waiting < 1:
        raise ConfigError(f"max_tokens is {args.max_tokens} and max_waiting {args.max_waiting}: each must be at least 1")
    stage, config = load_any(args.load, choose_device(args.device, 0))
    if args.dtype == "bf16":
        stage = stage.to(torch.bfloat16)
    tokenizer = load_tokenizer(config, args.tokenizer_type, args.tokenizer_model)
    return Engine(stage, config, tokenizer, most_waiting=args.max_waiting, int8_cache=args.int8_cache)


def main(arguments: list[str] | None = None) -> int:
    args = build_parser().parse_args(arguments)
    configure_logging(rank=0, world_size=1)
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        print(f"error: {error.name} is not installed: pip install 'megalite[serve]'", file=sys.stderr)
        return 2
    try:
        engine = load_engine(args)
    except (MegaliteError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    uvicorn.run(build_app(engine, Path(args.load).resolve().name, args.max_tokens), host=args.host, port=args.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
