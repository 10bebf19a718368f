"""Calls from threads without an event loop to the loop that has the node.

`aiogpu.sync` exports the public names. Imported late, because it imports asyncio.
"""

from aiogpu.api.portal.calls import Program as Program
from aiogpu.api.portal.executor import Executor as Executor
from aiogpu.api.portal.handle import Handle as Handle
from aiogpu.api.portal.handle import ResultIterator as ResultIterator
from aiogpu.api.portal.loop_thread import Portal as Portal
from aiogpu.api.portal.loop_thread import close_own_loop as close_own_loop
from aiogpu.api.portal.loop_thread import portal_for as portal_for
from aiogpu.api.portal.loop_thread import portal_of_program as portal_of_program
from aiogpu.api.portal.loop_thread import portal_to_program as portal_to_program
from aiogpu.api.portal.proxies import ActorPool as ActorPool
from aiogpu.api.portal.proxies import Queue as Queue
from aiogpu.api.portal.proxies import SyncActorHandle as SyncActorHandle
from aiogpu.api.portal.proxies import SyncGang as SyncGang
from aiogpu.api.portal.proxies import SyncLease as SyncLease
from aiogpu.api.portal.proxies import SyncNode as SyncNode
from aiogpu.api.portal.proxies import SyncPlacement as SyncPlacement
