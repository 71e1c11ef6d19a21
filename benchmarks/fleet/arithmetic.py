"""Which resource a pool of 10, 100 or 1,000 GPUs exhausts first, from measured costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from benchmarks.harness.pairs import show

GPUS = (10, 100, 1000)
GPU_ROWS = 922  # Rows per second of one GPU: hf-8b-rows in docs/benchmarks/devices.md, one H200.
ROW_BYTES = 2 * 128_256  # Bytes of a row of this model in bf16.
SMALL_BYTES = 2048  # Max bytes of a small result, such as 32 top tokens, with its notification.
HOST_GPUS = 8  # GPUs of one machine.
CLIENT_PER_GPU = 1  # Clients per GPU.
BUSY = 0.6  # Share of a master's core, or of a network link, that a pool may use: more makes queues long.
MASTER_GBIT, HOST_GBIT = 25, 100  # Gbit/s of the network link of a master's machine, and of a machine with GPUs.
MAX_CONNECTIONS = 10_000  # Default of Redis' setting maxclients.
SEGMENT_BYTES = 4 * 2**30  # Max bytes of shared memory that a worker takes by default.


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs.

    Attributes:
        request_us: processor time of the queue's master per request with a small row, at saturation.
        byte_us: processor time of the masters per byte of a row that goes through them.
        worker_us: processor time of the master per second and idle worker.
        client_us: processor time of the master per second and idle client.
        client_request_us: processor time of a client per request with a small row.
        worker_connections: connections of a worker to the server.
        client_connections: connections of a client to the server.
    """

    request_us: float
    byte_us: float
    worker_us: float
    client_us: float
    client_request_us: float
    worker_connections: float
    client_connections: float


@dataclass(frozen=True, slots=True)
class Road:
    """A way of results from workers to clients: their bytes, and the bytes that masters receive and send for each."""

    name: str
    result_bytes: int
    master_bytes: int


ROADS = (
    Road("rows through the masters", ROW_BYTES, ROW_BYTES),
    Road("rows straight to clients", ROW_BYTES, SMALL_BYTES),
    Road("32 top tokens", SMALL_BYTES, SMALL_BYTES),
)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a pool of `gpus` GPUs needs for one road."""

    costs: Costs
    road: Road
    gpus: int

    @property
    def requests(self) -> int:
        """Requests per second."""
        return self.gpus * GPU_ROWS

    @property
    def master_cores(self) -> float:
        """Cores of all masters together."""
        costs = self.costs
        # The measured cost of a request contains the bytes of a small row.
        request_us = costs.request_us + costs.byte_us * max(0, self.road.master_bytes - SMALL_BYTES)
        idle_us = self.gpus * (costs.worker_us + CLIENT_PER_GPU * max(0.0, costs.client_us))
        return (self.requests * request_us + idle_us) / 1e6

    @property
    def master_gbit(self) -> float:
        """Gbit/s that all masters together receive; they send as much."""
        return _gbit(self.requests * self.road.master_bytes)

    @property
    def host_gbit(self) -> float:
        """Gbit/s that a machine with GPUs sends."""
        return _gbit(min(self.gpus, HOST_GPUS) * GPU_ROWS * self.road.result_bytes)

    @property
    def client_cores(self) -> float:
        """Cores of all clients together, without the conversion of rows."""
        return self.requests * self.costs.client_request_us / 1e6

    @property
    def loads(self) -> dict[str, float]:
        """Resource -> share that the pool uses of it with one master."""
        return {
            "a master's core": self.master_cores,
            "a master's network": self.master_gbit / MASTER_GBIT,
            "a GPU machine's network": self.host_gbit / HOST_GBIT,
        }

    @property
    def masters(self) -> int:
        """Number of masters, each with one core for the server."""
        return ceil(max(self.master_cores, self.master_gbit / MASTER_GBIT) / BUSY)


def table(costs: Costs) -> Iterator[str]:
    """The table of demands, as Markdown."""
    columns = (
        "results", "GPUs", "requests/s", "masters' cores", "masters' network, each way, Gbit/s",
        "network of a GPU machine, Gbit/s", "clients' cores", "with one master, ends first", "masters",
    )  # fmt: skip
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for road in ROADS:
        for gpus in GPUS:
            demand = Demand(costs, road, gpus)
            first, load = max(demand.loads.items(), key=lambda item: item[1])
            ends = f"{first} ({100 * load:,.0f} %)" if load > BUSY else f"nothing ({first}: {100 * load:.0f} %)"
            cells = (
                road.name, f"{gpus:,}", f"{demand.requests:,}", show(demand.master_cores), show(demand.master_gbit),
                show(demand.host_gbit), show(demand.client_cores), ends, f"{demand.masters:,}",
            )  # fmt: skip
            yield f"| {' | '.join(cells)} |"


def shared_memory_s() -> float:
    """Seconds for which a worker's shared memory holds its rows."""
    return SEGMENT_BYTES / (GPU_ROWS * ROW_BYTES)


def _gbit(byte_rate: float) -> float:
    return 8 * byte_rate / 1e9
