"""The metadata services of the three clouds, as documented, at a port of this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from typing_extensions import override

from lightning_swarm.peer.preemption import Endpoint

TOKEN = "/latest/api/token"
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"

Pages = dict[str, str]
"""Path -> content; other paths are not found."""

Asked = tuple[str, str]


class Metadata:
    """A metadata service with the test's pages, for requests in the form that its provider demands."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []  # (method, path) of each request
        self.pages: Pages = {}
        self.tokens: list[str] = []  # valid tokens
        self.refuses: Callable[[str, str, Mapping[str, str]], int | None] = lambda *_: None
        self.flavor: str | None = None
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer("GET")

            def do_PUT(self) -> None:
                self.answer("PUT")

            def answer(self, method: str) -> None:
                service.asked.append((method, self.path))
                status = service.refuses(method, self.path, self.headers)  # type: ignore[arg-type]
                body = service.pages.get(self.path)
                if status is None:
                    status = 404 if body is None else 200
                said = (body or "nothing" if status == 200 else "<html>no</html>").encode()
                self.send_response(status)
                if service.flavor is not None:
                    self.send_header("Metadata-Flavor", service.flavor)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            @override
            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = Endpoint("127.0.0.1", self.server.server_port)
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    # Properties of each provider's service.

    def be_aws(self) -> None:
        self.pages = {TOKEN: "token 1"}
        self.tokens = ["token 1"]

        def refuses(method: str, path: str, headers: Mapping[str, str]) -> int | None:
            if path == TOKEN:
                asked_s = headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
                return None if method == "PUT" and asked_s.isdigit() and 0 < int(asked_s) <= 21600 else 405
            return None if headers.get("X-aws-ec2-metadata-token") in self.tokens else 401

        self.refuses = refuses

    def be_gcp(self) -> None:
        self.pages = {PREEMPTED: "FALSE"}
        self.flavor = "Google"
        self.refuses = lambda method, _, headers: (
            None if method == "GET" and headers.get("Metadata-Flavor") == "Google" else 403
        )

    def be_azure(self) -> None:
        self.pages = {NAME: "worker_3", EVENTS: json.dumps({"DocumentIncarnation": 1, "Events": []})}
        self.refuses = lambda method, _, headers: None if method == "GET" and headers.get("Metadata") == "true" else 400

    def schedule(self, kind: str, *resources: str, status: str = "Scheduled") -> None:
        """Schedule an event of Azure's."""
        event = {
            "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
            "EventStatus": status,
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": list(resources),
            "NotBefore": "Mon, 11 Apr 2022 22:26:58 GMT",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
        self.pages[EVENTS] = json.dumps({"DocumentIncarnation": 2, "Events": [event]})


def let_go(service: Metadata, name: str) -> None:
    """Simulate the provider's preemption of the machine."""
    if name == "aws":
        service.pages[ACTION] = '{"action": "terminate", "time": "2026-09-18T08:22:00Z"}'
    elif name == "gcp":
        service.pages[PREEMPTED] = "TRUE"
    else:
        service.schedule("Preempt", "worker_2", "worker_3")


REASONS = {
    "aws": "AWS will terminate this spot instance at 2026-09-18T08:22:00Z",
    "gcp": "GCP preempts this machine within 30 s",
    "azure": "Azure has scheduled a Preempt of this machine, Mon, 11 Apr 2022 22:26:58 GMT",
}
