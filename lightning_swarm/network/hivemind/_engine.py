"""The parts of hivemind that this package uses, imported without side effects on the process."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

import torch.multiprocessing


@contextmanager
def _process_settings_kept() -> Iterator[None]:
    # The import sets the start method to fork, torch's sharing strategy to files, and the name of a log level. Only
    # unused parts of hivemind need these settings.
    start_method = multiprocessing.get_start_method(allow_none=True)
    sharing_strategy = torch.multiprocessing.get_sharing_strategy()
    level_name = logging.getLevelName(logging.WARNING)
    try:
        yield
    finally:
        # With `force`, None means "not chosen yet".
        multiprocessing.set_start_method(start_method, force=True)
        torch.multiprocessing.set_sharing_strategy(sharing_strategy)
        logging.addLevelName(logging.WARNING, level_name)


with _process_settings_kept():
    from hivemind.dht.node import DHTNode
    from hivemind.dht.protocol import DHTProtocol, ValidationError
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.p2p import P2P, P2PContext, P2PDaemonError, PeerID
    from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
    from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, read_pbmsg_safe, write_pbmsg
    from hivemind.proto import dht_pb2, p2pd_pb2
    from hivemind.utils import MSGPackSerializer
    from hivemind.utils.multiaddr import Multiaddr

__all__ = [
    "DHTID",
    "P2P",
    "ControlFailure",
    "DHTNode",
    "DHTProtocol",
    "DHTRecord",
    "DictionaryDHTValue",
    "MSGPackSerializer",
    "Multiaddr",
    "P2PContext",
    "P2PDaemonError",
    "PeerID",
    "RecordValidatorBase",
    "StreamInfo",
    "ValidationError",
    "dht_pb2",
    "p2pd_pb2",
    "read_pbmsg_safe",
    "write_pbmsg",
]
