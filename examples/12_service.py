"""One box, many programs: this one joins the node that `aiogpu start` has started.

    aiogpu start --head --num-gpus=1
    python examples/12_service.py      # as often as you like, and at the same time
    aiogpu stop

The model is loaded by the first program that asks for it, and stays when that ends.
"""

import asyncio

import aiogpu


class Model:
    """Knows how often it was asked, by whichever program."""

    def __init__(self) -> None:
        self.asked = 0

    def score(self, text: str) -> int:
        """Score one text."""
        self.asked += 1
        return len(text)

    def count(self) -> int:
        """Return the number of texts scored for all programs."""
        return self.asked


@aiogpu.remote(num_gpus=0.25)
def embed(text: str) -> list[int]:
    """Run beside the model, on the same GPU, while there is room."""
    return [ord(letter) for letter in text]


async def main() -> None:
    """Join, find the model or load it, and leave."""
    async with aiogpu.init(address="auto"):
        print("GPUs shared by all:", (await aiogpu.cluster_resources())["GPU"])
        model = (
            aiogpu.remote(Model)
            .options(
                num_gpus=0.5, name="model", get_if_exists=True, lifetime="detached"
            )
            .remote()
        )
        texts = ["a", "bc", "def"]
        print(await asyncio.gather(*(model.score.remote(text) for text in texts)))
        print(await asyncio.gather(*map(embed.remote, texts)))
        print("scored so far:", await model.count.remote())


if __name__ == "__main__":
    aiogpu.run(main())
