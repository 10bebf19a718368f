"""Text for many clients: each has a stream, and one batch makes the words of all.

A client that leaves stops its own generation and nobody else's.
"""

import asyncio
from collections.abc import AsyncIterator

import numpy as np

import aiogpu

WORDS = ["a", "model", "writes", "one", "word", "after", "another", "."]


class LanguageModel:
    def __init__(self) -> None:
        self.steps, self.words = 0, 0
        # For each word the scores of the next; stands for weights on the GPU.
        self.weights = np.roll(np.eye(len(WORDS)), 1, axis=1)

    @aiogpu.batch(max_size=16, max_wait=0.005)
    async def step(self, tokens: list[int]) -> list[int]:
        """Run the model once, for all clients that wait for a word."""
        self.steps, self.words = self.steps + 1, self.words + len(tokens)
        scores = await asyncio.to_thread(self.weights.__getitem__, tokens)
        return [int(token) for token in scores.argmax(1)]

    async def generate(self, prompt: str) -> AsyncIterator[str]:
        token = WORDS.index(prompt)
        while WORDS[token] != ".":
            token = await self.step(token)
            yield WORDS[token]

    async def is_batching(self) -> bool:
        return self.steps < self.words


Models = aiogpu.remote(num_gpus=1)(LanguageModel)


async def main() -> None:
    async with aiogpu.init(num_gpus=1), Models.remote() as model:

        async def client(prompt: str, most: int) -> str:
            text = [prompt]
            async with model.generate.remote(prompt) as words:
                async for word in words:
                    text.append(word)
                    if len(text) == most:
                        break  # this client leaves
            return " ".join(text)

        clients = (client("a", 8), client("one", 8), client("a", 3))
        print(*await asyncio.gather(*clients), sep="\n")
        print("fewer steps than words:", await model.is_batching.remote())


if __name__ == "__main__":
    aiogpu.run(main())
