"""The unit by which systemd keeps a node for a user; see systemd.service(5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from aiogpu.accelerators.registry import KNOWN

NAME: Final = "aiogpu.service"
CARRIED: Final = (
    "CUDA_DEVICE_ORDER",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "TMPDIR",
    *(entry.variable for entry in KNOWN),
)
"""Variables that the user's services do not see, and a node may depend on."""

_UNIT: Final = """\
# One node for all programs of this user. Install it by
#   aiogpu start --head ... --systemd > ~/.config/systemd/user/{name}
#   systemctl --user daemon-reload
#   systemctl --user enable --now {name}
# and have it start with the machine, before anybody logs in, by
#   loginctl enable-linger
[Unit]
Description=aiogpu: one node for many programs
Documentation=man:systemd.service(5)

[Service]
Type=notify
NotifyAccess=main
{environment}ExecStart={command}
# SIGTERM goes to the node alone: it lets what runs end, then ends its workers.
KillMode=mixed
TimeoutStartSec={start:.0f}
TimeoutStopSec={stop:.0f}
# Each worker has a group of its own below this unit's.
Delegate=yes
# One of them that fills the memory is no reason to stop all.
OOMPolicy=continue
Restart=on-failure
RestartSec=2
# 2 is bad input, which no second try makes better.
RestartPreventExitStatus=2

[Install]
WantedBy=default.target
"""


def unit(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    opens_within: float,
    ends_within: float,
) -> str:
    """A user unit.

    Args:
        command: what starts the node in the foreground.
        environ: variables, of which those that matter to it are kept.
        opens_within: seconds until it is ready, at most.
        ends_within: seconds that its end takes at most, with the drain.
    """
    kept = ((name, environ[name]) for name in CARRIED if name in environ)
    return _UNIT.format(
        name=NAME,
        environment="".join(f"Environment={line}\n" for line in _assignments(kept)),
        command=" ".join(quoted(word).replace("$", "$$") for word in command),
        start=opens_within,
        stop=ends_within,
    )


def _assignments(variables: Iterable[tuple[str, str]]) -> Iterable[str]:
    return (quoted(f"{name}={value}") for name, value in variables)


def quoted(word: str) -> str:
    """A word as systemd.syntax(7) reads it back: quotes, escapes and specifiers."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    escaped = escaped.replace("\n", "\\n").replace("\t", "\\t")
    is_plain = escaped == word and word and not set(" ';") & set(word)
    return word if is_plain else f'"{escaped}"'
