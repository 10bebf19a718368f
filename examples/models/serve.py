"""A model server: where in a recording does somebody speak?

    pip install 'aiogpu[serve]' silero-vad
    python examples/models/serve.py            # http://127.0.0.1:8000/docs
    arecord -f S16_LE -r 16000 -d 5 > said
    curl --data-binary @said http://127.0.0.1:8000/speech

Silero's detector is a small recurrent network that comes with its package. Two copies
of it share a GPU, half of it each; without a GPU the same lines run on the CPU.
Requests that arrive together are one batch. A client that leaves stops its request.
"""

import asyncio
import sys
from collections.abc import AsyncIterator

import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException, Request

import aiogpu
from aiogpu.fastapi import cancel_on_disconnect, lifespan

RATE, WINDOW = 16_000, 512
LONGEST = 60 * RATE


class Detector:
    def __init__(self) -> None:
        import torch
        from silero_vad import load_silero_vad

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = load_silero_vad().to(self.device)
        self.batches = 0

    @aiogpu.batch(max_size=16, max_wait=0.01)
    async def windows(self, clips: list[np.ndarray]) -> list[list[float]]:
        """For each clip the probability of speech in each window of 32 ms."""
        self.batches += 1
        return await asyncio.to_thread(self._run, clips)

    def _run(self, clips: list[np.ndarray]) -> list[list[float]]:
        import torch

        longest = max(len(clip) for clip in clips)
        batch = np.zeros((len(clips), longest), np.float32)
        for row, clip in zip(batch, clips, strict=True):
            row[: len(clip)] = clip
        with torch.inference_mode():
            audio = torch.from_numpy(batch).to(self.device)
            found = self.model.audio_forward(audio, RATE).cpu().tolist()
        return [
            row[: -(-len(clip) // WINDOW)]
            for row, clip in zip(found, clips, strict=True)
        ]

    async def health(self) -> tuple[list[int | str], int]:
        """Its GPUs, and how many batches it has run."""
        return aiogpu.get_gpu_ids(), self.batches


Detectors = aiogpu.remote(num_gpus=0.5, max_restarts=-1)(Detector)


async def models(app: FastAPI) -> AsyncIterator[None]:
    async with aiogpu.ActorPool(Detectors, 2) as app.state.pool:
        yield


app = FastAPI(title="Speech", lifespan=lifespan(models, num_cpus=4, num_gpus=1))


@app.post("/speech")
async def speech(request: Request) -> dict[str, float | list[float]]:
    """The body is 16-bit mono PCM of 16 kHz, at most a minute."""
    body = await request.body()
    if not body or len(body) % 2 or len(body) > 2 * LONGEST:
        raise HTTPException(422, "send 16-bit mono PCM of 16 kHz, at most a minute")
    clip = np.frombuffer(body, "<i2").astype(np.float32) / 32768
    windows = request.app.state.pool.windows.remote(clip)
    found = [round(one, 3) for one in await cancel_on_disconnect(request, windows)]
    spoken = sum(one > 0.5 for one in found) * WINDOW / RATE
    return {"seconds_of_speech": round(spoken, 2), "windows": found}


@app.get("/healthz")
async def healthz(request: Request) -> list[dict[str, object]]:
    """The GPUs of each model, and how many batches it has run."""
    asked = [model.health.remote() for model in request.app.state.pool]
    async with asyncio.timeout(1):
        answers = await asyncio.gather(*asked)
    return [{"gpus": gpus, "batches": batches} for gpus, batches in answers]


if __name__ == "__main__":
    uvicorn.run(app, uds=sys.argv[1] if sys.argv[1:] else None, port=8000)
