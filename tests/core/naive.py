"""What a node of few GPUs gives to whom, said once more and as plainly as can be.

The rules of the contract, [B21] to [B23], and of decision 0024, by trying every set of
devices. It shares nothing with the core but the words of a request.
"""

from dataclasses import dataclass, field
from decimal import Decimal
from itertools import combinations

WHOLE = 10_000


@dataclass(frozen=True)
class Card:
    """A GPU: its type, and the bytes of its memory, 0 where nobody knows them."""

    type: str = "A100"
    memory: int = 0


@dataclass(frozen=True)
class Ask:
    """What a task writes: `num_gpus`, and more where it matters.

    Attributes:
        gpus: as a decimal text, so that it is exact.
        memory: bytes by name; None where it says "share".
    """

    gpus: str
    type: str | None = None
    spread: bool = False
    memory: int | None = 0

    @property
    def parts(self) -> int:
        """In parts of 1/10 000, finer ones cut off."""
        return int(Decimal(self.gpus) * WHOLE)

    @property
    def count(self) -> int:
        """On how many devices it is."""
        return max(self.parts // WHOLE, 1)

    @property
    def part(self) -> int:
        """What it takes of each of them."""
        return min(self.parts, WHOLE)

    @property
    def names(self) -> int:
        """The bytes that it names of each; a whole device is all of its memory."""
        return 0 if self.part == WHOLE or self.memory is None else self.memory


@dataclass
class NaiveNode:
    """Some GPUs, and who is on each of them."""

    cards: list[Card]
    held: list[list[Ask]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held = [[] for _ in self.cards]

    def free(self, at: int) -> int:
        """The parts of a device that nobody has."""
        return WHOLE - sum(ask.part for ask in self.held[at])

    def free_bytes(self, at: int, *more: Ask) -> int:
        """The bytes that nobody has, by name or as the part that his share is."""
        on = [*self.held[at], *more]
        named = sum(ask.names for ask in on)
        implied = sum(ask.part for ask in on if not ask.names)
        memory = self.cards[at].memory
        return memory - memory * implied // WHOLE - named

    def has_room(self, at: int, ask: Ask) -> bool:
        """Whether a device can be given to a task now."""
        card = self.cards[at]
        if ask.type not in (None, card.type):
            return False
        if ask.memory is None and not card.memory:
            return False
        if ask.memory and card.memory < ask.memory:
            return False
        if ask.part == WHOLE:
            return not self.held[at]
        return self.free(at) >= ask.part and self.free_bytes(at, ask) >= 0

    def choose(self, ask: Ask) -> tuple[int, ...] | None:
        """The best of all sets of devices that will do, None if none does."""
        sets = [
            chosen
            for chosen in combinations(range(len(self.cards)), ask.count)
            if all(self.has_room(at, ask) for at in chosen)
        ]
        return min(sets, key=lambda chosen: self.rank(chosen, ask), default=None)

    def rank(self, chosen: tuple[int, ...], ask: Ask) -> tuple[object, ...]:
        """The lower the better: the fullest or the emptiest, then the lowest ids."""
        at = chosen[0]
        if ask.part == WHOLE:
            return chosen
        if not ask.part:
            fullness = (self.free_bytes(at),)
        else:
            # One with somebody's memory on it is whole for nobody, so not quite empty.
            is_bare = self.free(at) == WHOLE and not self.held[at]
            fullness = (self.free(at), is_bare)
        if ask.spread:
            fullness = tuple(-each for each in fullness)
        return *fullness, at

    def is_feasible(self, ask: Ask) -> bool:
        """Whether it could ever be given, with nobody else there."""
        return NaiveNode(self.cards).choose(ask) is not None
