"""How long collectives between GPUs take: a latency, and bytes over the bandwidth of the links.

Each step of a collective costs a latency and its bytes over a link's bandwidth (Hockney, "The communication challenge
for MPP", 1994). With n ranks and B bytes on each,

    ring all-reduce      2 (n - 1) latency + 2 (n - 1)/n B / bandwidth
    one-shot all-reduce        latency     +   (n - 1)   B / bandwidth
    ring all-gather        (n - 1) latency +   (n - 1)/n B / bandwidth      (B: bytes of the gathered whole)

(Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005). One-shot is
what engines do with a few bytes where every pair of GPUs is connected: each rank reads what all others have. The faster
of the two is taken. Bandwidths are datasheet values for one direction, of which collectives reach a part; that part and
the latencies are assumptions, and the interval is as wide as they are unsure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from phaseprof.analyzers.efficiency.estimate import Estimate

#: What collectives reach of a link's datasheet bandwidth in one direction: likely, at worst, at best. Ring all-reduces
#: of large messages are commonly reported at about 230 of 300 GB/s on A100 and 370 of 450 GB/s on H100 boards.
_REACHED = (0.80, 0.60, 0.95)
#: A latency over the likely one: at best, at worst.
_LATENCY_SPREAD = (0.5, 2.0)


@dataclass(frozen=True, slots=True)
class Link:
    """What connects the GPUs of one host.

    Attributes:
        name: As people call it.
        bytes_per_s: Of one GPU in one direction, all its links together: half of what product pages headline.
        hop_s: Latency of one step of a ring.
        all_pairs: Whether every pair of GPUs is connected at that bandwidth, so that one-shot collectives pay.
        source: Where the bandwidth comes from.
    """

    name: str
    bytes_per_s: float
    hop_s: float
    all_pairs: bool
    source: str


#: Latency of a step over NVLink or Infinity Fabric, synchronisation of the ranks included; and over PCIe.
_HOP_S, _PCIE_HOP_S = 2.0e-6, 6.0e-6
#: Latency of a one-shot collective: a kernel, and a barrier before and after it.
_ONE_SHOT_S = 6.0e-6


def _nvlink(name: str, both_ways_gb_per_s: float, source: str) -> Link:
    return Link(name, both_ways_gb_per_s / 2 * 1e9, _HOP_S, True, source)


def _pcie(name: str, both_ways_gb_per_s: float, source: str) -> Link:
    return Link(name, both_ways_gb_per_s / 2 * 1e9, _PCIE_HOP_S, False, source)


#: By the board, as `phaseprof.collectors.datasheet` calls it. A bridge between two PCIe boards is not counted on.
LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "A100 SXM 80 GB": _nvlink("NVLink 3", 600, "NVIDIA A100 datasheet: NVLink 600 GB/s"),
        "A100 PCIe 80 GB": _pcie("PCIe 4 x16", 64, "NVIDIA A100 datasheet: PCIe Gen4 64 GB/s"),
        "A100 40 GB": _nvlink("NVLink 3", 600, "NVIDIA A100 datasheet: NVLink 600 GB/s (SXM)"),
        "L40S": _pcie("PCIe 4 x16", 64, "NVIDIA L40S datasheet: PCIe Gen4 x16, 64 GB/s"),
        "H100 PCIe": _pcie("PCIe 5 x16", 128, "NVIDIA H100 datasheet: PCIe Gen5 128 GB/s"),
        "H100 SXM": _nvlink("NVLink 4", 900, "NVIDIA H100 datasheet: NVLink 900 GB/s"),
        "H200 SXM": _nvlink("NVLink 4", 900, "NVIDIA H200 datasheet: NVLink 900 GB/s"),
        "B200 SXM": _nvlink("NVLink 5", 1800, "NVIDIA HGX B200 datasheet: NVLink 1.8 TB/s"),
        "MI300X": _nvlink(
            "Infinity Fabric", 896, "AMD Instinct MI300X datasheet: 7 links of 128 GB/s"
        ),
    }
)


def all_reduce(size_bytes: int, ranks: int, link: Link) -> Estimate:
    """Sum a tensor over all ranks, each of which then has the sum.

    Args:
        size_bytes: Of the tensor on each rank.
        ranks: Ranks of the group; with one there is nothing to do.
        link: What connects them.
    """
    if ranks < 2 or size_bytes <= 0:
        return _nothing(link)
    ring = _timed(2 * (ranks - 1) * link.hop_s, 2 * (ranks - 1) / ranks * size_bytes, link)
    if not link.all_pairs and ranks > 2:
        return ring
    one_shot = _timed(max(_ONE_SHOT_S, link.hop_s), (ranks - 1) * size_bytes, link)
    return min(ring, one_shot, key=lambda estimate: estimate.seconds)


def all_gather(size_bytes: int, ranks: int, link: Link) -> Estimate:
    """Give every rank the parts of all.

    Args:
        size_bytes: Of the whole.
        ranks: Ranks of the group; with one there is nothing to do.
        link: What connects them.
    """
    if ranks < 2 or size_bytes <= 0:
        return _nothing(link)
    moved = (ranks - 1) / ranks * size_bytes
    ring = _timed((ranks - 1) * link.hop_s, moved, link)
    if not link.all_pairs and ranks > 2:
        return ring
    return min(
        ring, _timed(max(_ONE_SHOT_S, link.hop_s), moved, link), key=lambda each: each.seconds
    )


def _timed(latency_s: float, moved_bytes: float, link: Link) -> Estimate:
    likely, worst, best = (moved_bytes / (link.bytes_per_s * part) for part in _REACHED)
    quick, slow = _LATENCY_SPREAD
    return Estimate(
        seconds=latency_s + likely,
        low=latency_s * quick + best,
        high=latency_s * slow + worst,
        reference=_reference(link),
    )


def _nothing(link: Link) -> Estimate:
    return Estimate(seconds=0.0, low=0.0, high=0.0, reference=_reference(link))


def _reference(link: Link) -> str:
    return f"{link.name}, {link.bytes_per_s / 1e9:.0f} GB/s in one direction ({link.source})"
