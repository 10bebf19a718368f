"""Programs that contend for a node of paper, in a time of paper."""

from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

from aiogpu.testing import World


@dataclass
class Contender:
    """A program that always wants more.

    Attributes:
        seconds: how long its tasks take in the mean.
        had: resource-seconds that it has had of the contended one.
        ran: tasks that have ended.
    """

    id: int
    weight: float = 1.0
    seconds: float = 1.0
    jitter: float = 0.2
    cpus: float = 1
    gpus: float = 0
    flood: int = 20
    priority: int = 0
    has_own_environment: bool = True
    waits: int = 0
    had: float = 0.0
    ran: int = 0
    longest: float = 0.0

    @property
    def size(self) -> float:
        """What one task holds of the contended resource."""
        return self.gpus or self.cpus


class Contest(World):
    """Lets programs contend, each task for as long as it takes."""

    def __init__(self, contenders, seed=0, **options) -> None:
        self._seen = 0
        super().__init__(**options)
        self._random = Random(seed)
        self._ends: list[tuple[float, str]] = []
        self._begun: dict[str, float] = {}
        self._came: dict[str, float] = {}
        self.contenders = {each.id: each for each in contenders}
        for each in contenders:
            self.join(each.id, each.weight)

    def check(self) -> None:
        """Look at the books now and then: they are long."""
        self._seen += 1
        if self._seen % 97 == 0:
            super().check()

    def feed(self, contender) -> None:
        """Have as many of its tasks wait as it floods with."""
        missing = contender.flood - contender.waits
        for _ in range(missing):
            name = f"{contender.id}:{len(self.tasks)}"
            variables = {"P": str(contender.id)}
            self._came[name] = self.now
            contender.waits += 1
            self.submit(
                name,
                num_cpus=contender.cpus,
                num_gpus=contender.gpus,
                priority=contender.priority,
                function=contender.id,
                environment=variables if contender.has_own_environment else None,
                client=contender.id,
            )

    def play(self, seconds: float) -> None:
        """Let the contest go on."""
        until = self.now + seconds
        self._note()
        while self._ends and self._ends[0][0] <= until:
            moment, name = heappop(self._ends)
            self.advance(max(moment - self.now, 0.0))
            contender = self._whose(name)
            self.took = moment - self._begun[name]
            contender.had += contender.size * self.took
            contender.ran += 1
            self.finish(name)
            self._note()
            self.feed(contender)
            self._note()
        self.advance(until - self.now)

    def _whose(self, name: str) -> Contender:
        return self.contenders[int(name.split(":")[0])]

    def _note(self) -> None:
        """Those that run now end some time later."""
        for name in sorted(self.running - self._begun.keys()):
            contender = self._whose(name)
            contender.waits -= 1
            waited = self.now - self._came[name]
            contender.longest = max(contender.longest, waited)
            spread = contender.seconds * contender.jitter
            seconds = contender.seconds + self._random.uniform(-spread, spread)
            self._begun[name] = self.now
            heappush(self._ends, (self.now + seconds, name))


def jain(amounts) -> float:
    """Jain's index: 1 where all have the same, 1/n where one has all."""
    amounts = list(amounts)
    return sum(amounts) ** 2 / (len(amounts) * sum(each**2 for each in amounts))
