"""`phaseprof calibrate`: measure this device's roofs and keep them."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from phaseprof.cli.options import AsJson
from phaseprof.errors import UsageError


def calibrate(
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda or cuda:N. Default: CUDA if there is a device.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="float32, bfloat16 or float16; may be given several times. Default: float32 and bfloat16, on CUDA "
            "float16 too.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Measure again what is in the cache.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="About how long to measure, in all.")
    ] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Measure how fast this device multiplies matrices and reads memory.

    It takes a few seconds, and the figures are kept for this device, its number of threads and this torch. Every share
    of a roof (MFU, MBU) is a share of them: run it while nothing else runs.
    """
    from phaseprof.cli.render import calibrate as render
    from phaseprof.cli.render.layout import to_ascii
    from phaseprof.cli.render.progress import TerminalProgress
    from phaseprof.cli.render.stream import takes_unicode, width_of
    from phaseprof.collectors import ceilings

    for name in dtype or ():
        if name not in ceilings.MEASURED_DTYPES:
            raise UsageError(
                f"--dtype {name!r} is not one that is measured.",
                f"Use {', '.join(ceilings.MEASURED_DTYPES)}.",
            )
    if not seconds > 0:
        raise UsageError(f"--seconds {seconds:g} is not more than 0.")
    with TerminalProgress() as progress:
        progress("Loading torch")
        from phaseprof.devices import describe

        subject = describe(device or _default_device())
        wanted = dtype or ["float32", "bfloat16", *(["float16"] if subject.kind == "cuda" else [])]
        # A cache that cannot be written is said before the seconds are spent.
        path = str(ceilings.store(()))
        known = {} if force else {entry.dtype: entry for entry in ceilings.load(subject)}
        missing = [name for name in wanted if name not in known]
        if missing:
            measured = ceilings.measure(
                subject,
                missing,
                seconds=seconds,
                progress=lambda done, total, what: progress(what, done, total),
            )
            ceilings.store(measured)
            known |= {entry.dtype: entry for entry in measured}
    shown = [known[name] for name in dict.fromkeys(wanted)]
    if as_json:
        print(render.to_json(subject, shown, cache=path))
        return
    text = render.render(
        subject,
        shown,
        cache=path,
        now_ns=time.time_ns(),
        noisy_spread=ceilings.NOISY_SPREAD,
        width=width_of(sys.stdout),
    )
    print(text if takes_unicode(sys.stdout) else to_ascii(text))


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
