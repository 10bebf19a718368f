"""Devices that are given to nobody for now, or only where nothing else is left."""

from __future__ import annotations


class Aside:
    """Why devices of one kind are not to be used.

    Attributes:
        aside: why a device is given to nobody for now, by index; others only read it.
        aside_mask: those devices.
        avoided_mask: devices that are chosen last.
    """

    def __init__(self) -> None:
        self.aside: dict[int, str] = {}
        self.aside_mask = 0
        self.avoided_mask = 0
        self._unsettled: dict[int, str] = {}
        self._sick: dict[int, str] = {}
        self._foreign: dict[int, str] = {}
        self._followed: Aside | None = None
        self._followers: list[Aside] = []

    def follow(self, other: Aside) -> None:
        """Have the same devices aside as `other`, for the same reasons, from now on."""
        self._followed = other
        other._followers.append(self)
        self._copy(other)

    def unfollow(self) -> None:
        """End `follow`."""
        followed, self._followed = self._followed, None
        assert followed is not None, self
        followed._followers.remove(self)

    def _copy(self, other: Aside) -> None:
        self.aside = other.aside
        self.aside_mask, self.avoided_mask = other.aside_mask, other.avoided_mask

    def set_aside(self, index: int, reason: str) -> None:
        """Give a device to nobody until it is back; who has a share of it keeps it."""
        self._unsettled[index] = reason
        self._judge(index)

    def put_back(self, index: int) -> None:
        """Undo `set_aside`; nothing happens where it was not."""
        self._unsettled.pop(index, None)
        self._judge(index)

    def mark_sick(self, index: int, reason: str) -> None:
        """The same as `set_aside`, for a reason that comes and goes by itself."""
        self._sick[index] = reason
        self._judge(index)

    def mark_well(self, index: int) -> None:
        """Undo `mark_sick`; nothing happens where it was not."""
        self._sick.pop(index, None)
        self._judge(index)

    def note_foreign(self, index: int, reason: str | None, *, is_avoided: bool) -> None:
        """Processes are on a device that are none of the node's; None: none any more.

        Args:
            index: the device.
            reason: who they are.
            is_avoided: whether others are chosen first; else it is set aside.
        """
        bit = 1 << index
        self._foreign.pop(index, None)
        self.avoided_mask &= ~bit
        if reason is not None and is_avoided:
            self.avoided_mask |= bit
        elif reason is not None:
            self._foreign[index] = reason
        self._judge(index)

    def _judge(self, index: int) -> None:
        """Put together why a device is given to nobody, if it is not."""
        seen, sick = self._unsettled.get(index, ""), self._sick.get(index, "")
        # Both may tell of one failure, in the same words.
        fresh = [reason for reason in sick.split("; ") if reason not in seen]
        others = self._foreign.get(index, "")
        if seen or sick or others:
            self.aside[index] = "; ".join(filter(None, (seen, *fresh, others)))
            self.aside_mask |= 1 << index
        else:
            self.aside.pop(index, None)
            self.aside_mask &= ~(1 << index)
        for follower in self._followers:
            follower._copy(self)

    def check_aside(self) -> None:
        """Assert that the mask is that of the reasons."""
        mask = sum(1 << index for index in self.aside)
        assert mask == self.aside_mask, (self.aside, self.aside_mask)
        if self._followed is not None:
            assert self.aside is self._followed.aside, self
            assert self.aside_mask == self._followed.aside_mask, self
            assert self.avoided_mask == self._followed.avoided_mask, self
            return
        known = self._unsettled.keys() | self._sick.keys() | self._foreign.keys()
        assert self.aside.keys() == known, (self.aside, known)
