"""A model behind HTTP: two actors on halves of a GPU, calls gathered into batches.

`python examples/08_serve.py [SOCKET]`; `pip install 'aiogpu[serve]'` brings what it
needs. Where there is no GPU, a logical one will do.
"""

import asyncio
import sys
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

import aiogpu
from aiogpu.fastapi import StreamResponse, cancel_on_disconnect, lifespan


class Model:
    """Lives in a process of its own; here it would load weights onto `cuda:0`."""

    def __init__(self) -> None:
        self.batches = 0

    @aiogpu.batch(max_size=32, max_wait=0.005, max_concurrency=2)
    async def predict(self, texts: list[str]) -> list[int | Exception]:
        self.batches += 1
        try:
            if "for ever" in texts:
                await asyncio.Event().wait()
        finally:
            self.batches -= 1
        return [len(text) if text else ValueError("there is no text") for text in texts]

    async def spell(self, text: str) -> AsyncIterator[str]:
        """Give one token after the other."""
        self.batches += 1
        try:
            for letter in text:
                yield letter
            if text == "for ever":
                await asyncio.Event().wait()
        finally:
            self.batches -= 1

    async def health(self) -> tuple[list[int | str], int]:
        """Its GPUs, and how many batches and streams it is at."""
        return aiogpu.get_gpu_ids(), self.batches


# Without end it is made anew when its process dies; calls that come then wait for it.
Models = aiogpu.remote(num_gpus=0.5, max_restarts=-1)(Model)


async def models(app: FastAPI) -> AsyncIterator[None]:
    """The models live as long as the server; the node is open before and after."""
    app.state.models = [Models.remote() for _ in range(2)]
    app.state.pool = await aiogpu.ActorPool(app.state.models)
    yield


app = FastAPI(lifespan=lifespan(models, num_gpus=1))


@app.exception_handler(aiogpu.ActorDiedError)
async def unavailable(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, 503)


@app.get("/predict")
async def predict(text: str, request: Request) -> int:
    """Ask the least busy of the models; stop it if the client hangs up."""
    call: aiogpu.Handle[int] = request.app.state.pool.predict.remote(text)
    try:
        return await cancel_on_disconnect(request, call)
    except ValueError as error:
        raise HTTPException(422, str(error)) from None


@app.get("/spell")
async def spell(text: str, request: Request) -> StreamResponse:
    """Send tokens as the first model gives them; stop it if the client hangs up."""
    return StreamResponse(request.app.state.models[0].spell.remote(text))


@app.get("/healthz")
async def healthz(request: Request) -> list[dict[str, object]]:
    """Check that all models answer; return their GPUs and their load."""
    try:
        async with asyncio.timeout(1):
            asked = [model.health.remote() for model in request.app.state.models]
            found = await asyncio.gather(*asked)
    except TimeoutError as error:
        raise HTTPException(503, repr(error)) from None
    return [{"gpus": gpus, "batches": batches} for gpus, batches in found]


if __name__ == "__main__":
    path = sys.argv[1] if sys.argv[1:] else None
    uvicorn.run(app, uds=path, port=8000, timeout_graceful_shutdown=3)
