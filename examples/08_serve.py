"""A model behind HTTP: two actors on halves of a GPU, calls gathered into batches.

`python examples/08_serve.py [SOCKET]`; `pip install 'aiogpu[serve]'` brings what it
needs. Where there is no GPU, a logical one will do.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, HTTPException, Request

import aiogpu


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

    async def health(self) -> tuple[list[int | str], int]:
        """Its GPUs, and how many batches it is at."""
        return aiogpu.get_gpu_ids(), self.batches


# Without end it is made anew when its process dies; calls that come then wait for it.
Models = aiogpu.remote(num_gpus=0.5, max_restarts=-1)(Model)


class Replica:
    """One actor, and how many calls are with it."""

    def __init__(self) -> None:
        self.model = Models.remote()
        self.calls = 0


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The node opens and closes with the server; what is left of it ends then."""
    await aiogpu.init()
    if not (await aiogpu.cluster_resources())["GPU"]:
        await aiogpu.shutdown()
        await aiogpu.init(num_gpus=1)
    try:
        app.state.replicas = [Replica(), Replica()]
        await asyncio.gather(*(replica.model for replica in app.state.replicas))
        yield
    finally:
        await aiogpu.shutdown()


app = FastAPI(lifespan=lifespan)


@app.get("/predict")
async def predict(text: str, request: Request) -> int:
    """Ask the least busy of the models; stop it if the client hangs up."""
    replica: Replica = min(request.app.state.replicas, key=lambda each: each.calls)
    call: aiogpu.Handle[int] = replica.model.predict.remote(text)
    watch = asyncio.create_task(hung_up(request))
    watch.add_done_callback(lambda _: call.cancel())
    replica.calls += 1
    try:
        return await call
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    except aiogpu.ActorDiedError as error:
        raise HTTPException(503, str(error)) from None
    except asyncio.CancelledError:
        if not watch.done():
            raise
        raise HTTPException(499, "the client has hung up") from None
    finally:
        replica.calls -= 1
        watch.cancel()


async def hung_up(request: Request) -> None:
    """Wait until nobody listens for the answer."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@app.get("/healthz")
async def healthz(request: Request) -> list[dict[str, object]]:
    """Whether all models answer, on which GPUs, and how busy they are."""
    replicas: list[Replica] = request.app.state.replicas
    try:
        async with asyncio.timeout(1):
            asked = [replica.model.health.remote() for replica in replicas]
            found = await asyncio.gather(*asked)
    except (TimeoutError, aiogpu.ActorDiedError) as error:
        raise HTTPException(503, repr(error)) from None
    return [
        {"gpus": gpus, "batches": batches, "calls": replica.calls}
        for replica, (gpus, batches) in zip(replicas, found, strict=True)
    ]


if __name__ == "__main__":
    path = sys.argv[1] if sys.argv[1:] else None
    uvicorn.run(app, uds=path, port=8000, timeout_graceful_shutdown=3)
