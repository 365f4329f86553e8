"""Whether a run's collectors will sample a GPU: then it should run for long enough to have something of every phase."""

from __future__ import annotations

from phaseprof.collectors.known import choose


def samples_gpus(wanted: str | None) -> bool:
    """Whether one of the collectors that are asked for samples GPUs here.

    Args:
        wanted: As `--collect` takes it; None for the defaults.

    Raises:
        UsageError: As `choose`.
    """
    names = {each.known.name for each in choose(wanted)}
    if names & {"nvml", "gpm"}:
        from phaseprof.collectors import nvml_samples

        if nvml_samples.probe().available:
            return True
    if "pm" in names:
        from phaseprof.collectors.pm import PmCollector

        return PmCollector().probe().available
    return False
