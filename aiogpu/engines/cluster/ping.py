"""A ping of Ray's server for `ray://`, within a time of ours.

Ray's own client waits for one without end, and says nothing of why none has come.
"""

from __future__ import annotations

from typing import Final

from aiogpu.errors import NodeError

METHOD: Final = "/ray.rpc.RayletDriver/ClusterInfo"
PING: Final = b"\x08\x06"
"""A request of Ray's, of the kind PING."""


def ping(host: str, port: int, seconds: float) -> tuple[str, str]:
    """What has come of it: the name of a status of gRPC, and what is said of it.

    Raises:
        NodeError: Ray's client is not installed.
    """
    try:
        import grpc
    except ImportError as error:
        raise NodeError(
            "init(address='ray://...'): Ray is installed here without its client. "
            "Install it: pip install 'aiogpu[ray]'."
        ) from error
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with grpc.insecure_channel(where) as channel:
        try:
            channel.unary_unary(METHOD)(PING, timeout=seconds)
        except grpc.RpcError as error:
            return error.code().name, error.details() or ""
    return "OK", ""
