"""Changes of a run, and the setting that several of them make together.

A setting is what is different from the run as it was measured; None in a field means that this stays as it was. Each
change fills one field of it, so that changes of different fields commute and the last of two of one field counts.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from phaseprof.errors import UsageError
from phaseprof.trace.meta import Ceilings, Device


class WeightFormat(enum.StrEnum):
    """How the matrices of a model are stored, the output head left as it is."""

    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> float:
        """Bits of a weight with its scales: FP8 and INT8 have one of a row (too few to count), INT4 one of 16 bits for
        each 128 weights (GPTQ, AWQ)."""
        return 4 + 16 / 128 if self is WeightFormat.INT4 else 8.0

    @property
    def label(self) -> str:
        return f"{self.value.upper()} weights"


class KvFormat(enum.StrEnum):
    """How keys and values are stored."""

    FP8 = "fp8"
    INT8 = "int8"

    @property
    def bits(self) -> float:
        """Bits of an element: INT8 has a scale of 16 bits for each head of a token, of 128 elements."""
        return 8 + 16 / 128 if self is KvFormat.INT8 else 8.0

    @property
    def label(self) -> str:
        return f"{self.value.upper()} KV cache"


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device, as far as its roofs are known.

    Attributes:
        name: What people call it.
        kind: ``cpu`` or ``cuda``.
        memory_bytes: Its memory; None if not known.
        roofs: Measured roofs by dtype, where there are any, else those of the datasheet.
        sheet: Roofs of the datasheet by dtype; empty for a device without one.
        board: What `phaseprof.collectors.datasheet` calls it; empty for one that it does not know.
    """

    name: str
    kind: str
    memory_bytes: int | None = None
    roofs: Mapping[str, Ceilings] = field(default_factory=dict)
    sheet: Mapping[str, Ceilings] = field(default_factory=dict)
    board: str = ""

    def has(self, dtype: str) -> bool:
        """Whether its roofs for a dtype are known."""
        return dtype in self.roofs or dtype in self.sheet

    def peak_gain(self, dtype: str, narrow: str) -> float | None:
        """The peak of a narrower dtype over that of another; None if the device is not known to multiply in it.

        Peaks of one source are compared: a datasheet's with a datasheet's.
        """
        for known in (self.sheet, self.roofs):
            wide = known.get(dtype)
            best = [roofs for name, roofs in known.items() if name.startswith(narrow)]
            if wide is not None and best:
                return max(roofs.flops_per_s for roofs in best) / wide.flops_per_s
        return None


def hardware_of(device: Device | None, roofs: Iterable[Ceilings]) -> Hardware:
    """A device by what a trace says of it.

    Args:
        device: None if it was not recorded.
        roofs: What is known of it.
    """
    known = {each.dtype: each for each in roofs}
    if device is None:
        return Hardware("this device", "", roofs=known)
    return Hardware(device.name, device.kind, device.memory_bytes, known)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Tokens drafted and verified in one step.

    Attributes:
        drafts: Drafted tokens of a step and sequence, k; 0 for none.
        acceptance: Chance that a drafted token is accepted where the one before it was; None: as measured, else
            assumed.
        draft_cost: Time to draft a token over the time of a decode step; None: as measured, else assumed.
    """

    drafts: int
    acceptance: float | None = None
    draft_cost: float | None = None

    def __post_init__(self) -> None:
        if self.drafts < 0:
            raise UsageError(f"{self.drafts} drafted tokens are less than none.")
        if self.acceptance is not None and not 0 <= self.acceptance < 1:
            raise UsageError(f"an acceptance of {self.acceptance:g} is not from 0 up to 1.")
        if self.draft_cost is not None and self.draft_cost < 0:
            raise UsageError(f"a draft cost of {self.draft_cost:g} is less than nothing.")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is different from the run as it was measured.

    Attributes:
        weights, kv: Formats.
        sequences: Sequences of a step.
        graphs: Decode steps are launched as CUDA graphs.
        speculation: Drafts.
        chunk_tokens: Prefill tokens of a mixed step.
        kv_heads: Heads that share keys and values; 0 stands for latents (MLA).
        device: Another device.
        ranks: Ranks that each layer is split over.
    """

    weights: WeightFormat | None = None
    kv: KvFormat | None = None
    sequences: int | None = None
    graphs: bool = False
    speculation: Speculation | None = None
    chunk_tokens: int | None = None
    kv_heads: int | None = None
    device: Hardware | None = None
    ranks: int | None = None


#: In `Setting.kv_heads`: latents of a token in the place of keys and values.
LATENTS = 0


@dataclass(frozen=True, slots=True)
class Weights:
    """Store the matrices in another format."""

    format: WeightFormat

    @property
    def title(self) -> str:
        return self.format.label

    def to(self, setting: Setting) -> Setting:
        return replace(setting, weights=self.format)


@dataclass(frozen=True, slots=True)
class KvCache:
    """Store keys and values in another format."""

    format: KvFormat

    @property
    def title(self) -> str:
        return self.format.label

    def to(self, setting: Setting) -> Setting:
        return replace(setting, kv=self.format)


@dataclass(frozen=True, slots=True)
class Batch:
    """Run so many sequences in a step."""

    sequences: int

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise UsageError(f"a batch of {self.sequences} is less than one sequence.")

    @property
    def title(self) -> str:
        return f"batch {self.sequences:,}"

    def to(self, setting: Setting) -> Setting:
        return replace(setting, sequences=self.sequences)


@dataclass(frozen=True, slots=True)
class Graphs:
    """Launch decode steps as CUDA graphs."""

    @property
    def title(self) -> str:
        return "CUDA graphs"

    def to(self, setting: Setting) -> Setting:
        return replace(setting, graphs=True)


@dataclass(frozen=True, slots=True)
class Speculate:
    """Draft tokens and verify them."""

    speculation: Speculation

    @property
    def title(self) -> str:
        said = self.speculation.acceptance
        at = "" if said is None else f", acceptance {said:g}"
        return f"speculation, k = {self.speculation.drafts}{at}"

    def to(self, setting: Setting) -> Setting:
        return replace(setting, speculation=self.speculation)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prefill in chunks of another size."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UsageError(f"chunks of {self.tokens} tokens are less than one token.")

    @property
    def title(self) -> str:
        return f"chunks of {self.tokens:,} tokens"

    def to(self, setting: Setting) -> Setting:
        return replace(setting, chunk_tokens=self.tokens)


@dataclass(frozen=True, slots=True)
class KvHeads:
    """A model with another number of heads of keys and values."""

    heads: int

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise UsageError(f"{self.heads} heads of keys and values are less than one.")

    @property
    def title(self) -> str:
        return "one KV head (MQA)" if self.heads == 1 else f"{self.heads} KV heads"

    def to(self, setting: Setting) -> Setting:
        return replace(setting, kv_heads=self.heads)


@dataclass(frozen=True, slots=True)
class Mla:
    """A model that keeps a latent of each token in the place of keys and values."""

    @property
    def title(self) -> str:
        return "latent attention (MLA)"

    def to(self, setting: Setting) -> Setting:
        return replace(setting, kv_heads=LATENTS)


@dataclass(frozen=True, slots=True)
class OtherDevice:
    """Run on another device."""

    hardware: Hardware

    @property
    def title(self) -> str:
        return self.hardware.board or self.hardware.name

    def to(self, setting: Setting) -> Setting:
        return replace(setting, device=self.hardware)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Split each layer over so many ranks."""

    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise UsageError(f"{self.ranks} ranks are less than one.")

    @property
    def title(self) -> str:
        return f"tensor parallel over {self.ranks}"

    def to(self, setting: Setting) -> Setting:
        return replace(setting, ranks=self.ranks)


Change = (
    Weights
    | KvCache
    | Batch
    | Graphs
    | Speculate
    | Chunk
    | KvHeads
    | Mla
    | OtherDevice
    | TensorParallel
)


def together(changes: Iterable[Change]) -> Setting:
    """The setting that all of them make."""
    setting = Setting()
    for change in changes:
        setting = change.to(setting)
    return setting
