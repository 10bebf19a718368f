"""Batch inference: files are decoded on CPUs, a model reads them on shares of a GPU.

    pip install aiogpu silero-vad
    python examples/models/infer.py [FOLDER]   # WAV files: 16 bit, mono, 16 kHz

Decoding and the model run at the same time. The samples go from process to process
through shared memory, not through the program, and at most eight files are ahead.
"""

import sys
import tempfile
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from voice import RATE, voice

import aiogpu

WINDOW = 512


@aiogpu.remote
def decode(path: Path) -> np.ndarray:
    with wave.open(str(path)) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (
            RATE,
            1,
            2,
        ):
            raise ValueError(f"{path.name} is not 16-bit mono of 16 kHz")
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return samples.astype(np.float32) / 32768


class Detector:
    def __init__(self) -> None:
        import torch
        from silero_vad import load_silero_vad

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = load_silero_vad().to(self.device)

    def speech(self, samples: np.ndarray) -> float:
        """How many seconds of a recording are speech."""
        import torch

        with torch.inference_mode():
            audio = torch.from_numpy(samples).to(self.device)[None]
            found = self.model.audio_forward(audio, RATE)
        return float((found > 0.5).sum()) * WINDOW / RATE


Detectors = aiogpu.remote(num_gpus=0.5)(Detector)


def make_recordings(folder: Path, count: int) -> None:
    """Write files with a synthetic voice that speaks for 1, 2 or 3 of 4 seconds."""
    for number in range(count):
        samples = np.zeros(4 * RATE, "<i2")
        spoken = voice(1 + number % 3, pitch=110 + 5 * number)
        samples[: len(spoken)] = spoken * 32767
        with wave.open(str(folder / f"{number:02}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", "not compressed"))
            file.writeframes(samples.tobytes())


async def main(paths: list[Path]) -> None:
    def decoded() -> Iterator[aiogpu.Handle[np.ndarray]]:
        for path in paths:
            yield decode.remote(path)  # a handle, which arrives as the samples

    async with (
        aiogpu.init(num_cpus=4, num_gpus=1),
        aiogpu.ActorPool(Detectors, 2) as pool,
        pool.speech.map(decoded(), limit=8, return_exceptions=True) as found,
    ):
        results = [each async for each in found]
    for path, seconds in zip(paths, results, strict=True):
        is_bad = isinstance(seconds, Exception)
        print(path.name, seconds if is_bad else f"{seconds:.1f} s of speech")


if __name__ == "__main__":
    if sys.argv[1:]:
        aiogpu.run(main(sorted(Path(sys.argv[1]).glob("*.wav"))))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            make_recordings(Path(scratch), 12)
            aiogpu.run(main(sorted(Path(scratch).glob("*.wav"))))
