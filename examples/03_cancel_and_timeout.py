"""Cancelling stops the work, whoever asks; `spin` reports how, over a socket."""

import asyncio
import socket
import tempfile

import aiogpu


@aiogpu.remote(num_gpus=0.5)
def spin(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as program:
        program.connect(path)
        try:
            program.sendall(b"spin: running\n")
            while True:
                sum(range(1000))
        except KeyboardInterrupt:
            program.sendall(b"spin: stopped by KeyboardInterrupt\n")


@aiogpu.remote(num_gpus=0.5)
async def wait() -> None:
    await asyncio.Event().wait()


async def cancel_spin() -> None:
    async def listen(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while line := (await reader.readline()).decode():
            reports.put_nowait(line.strip())
        writer.close()

    reports: asyncio.Queue[str] = asyncio.Queue()
    with tempfile.TemporaryDirectory() as directory:
        async with await asyncio.start_unix_server(listen, f"{directory}/socket"):
            handle = spin.remote(f"{directory}/socket")
            print(await reports.get())
            handle.cancel()
            print(await reports.get())


async def main() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        await cancel_spin()
        try:
            await wait.options(timeout=0.2).remote()
        except aiogpu.TaskTimeoutError as error:
            print(str(error).partition(":")[0])  # the rest says how long it ran
        try:
            async with asyncio.timeout(0.2):
                await wait.remote()
        except TimeoutError:
            print("wait: stopped by asyncio.timeout")


if __name__ == "__main__":
    aiogpu.run(main())
