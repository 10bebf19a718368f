"""Several server processes and one model: each process joins the node of the machine.

    aiogpu start --head --num-gpus=1
    uvicorn --app-dir examples --workers 2 23_workers:app
    aiogpu stop

`pip install 'aiogpu[serve]'` brings what it needs. Nodes of their own would each give
the GPU away. The first process that asks makes the model, which stays when servers end.
"""

import os
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request

import aiogpu
from aiogpu.fastapi import cancel_on_disconnect, lifespan


class Model:
    def __init__(self) -> None:
        self.asked = 0

    def score(self, text: str) -> dict[str, int]:
        self.asked += 1
        return {"score": len(text), "asked": self.asked}


Models = aiogpu.remote(
    num_gpus=1, name="model", get_if_exists=True, lifetime="detached"
)(Model)


async def model(app: FastAPI) -> AsyncIterator[None]:
    app.state.model = await Models.remote()
    yield


app = FastAPI(lifespan=lifespan(model, address="auto"))


@app.get("/score")
async def score(text: str, request: Request) -> dict[str, int]:
    """Ask the model; stop it if the client hangs up."""
    call = request.app.state.model.score.remote(text)
    return {**await cancel_on_disconnect(request, call), "server": os.getpid()}
