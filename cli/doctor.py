"""`phaseprof doctor`: what is here, what can be measured with it, and what would help."""

from __future__ import annotations

import sys

from phaseprof.cli.options import AsJson


def doctor(
    as_json: AsJson = False,
) -> None:
    """Say what is installed, which devices there are, and what can be measured here and why not.

    It looks and measures nothing; a figure comes from `phaseprof calibrate`.
    """
    from phaseprof.cli.render import doctor as render
    from phaseprof.cli.render.layout import to_ascii
    from phaseprof.cli.render.progress import TerminalProgress
    from phaseprof.cli.render.stream import takes_color, takes_unicode, width_of
    from phaseprof.collectors.environment import inspect

    with TerminalProgress() as progress:
        progress("Looking around")
        sections = inspect()
    if as_json:
        print(render.to_json(sections))
        return
    text = render.render(sections, width=width_of(sys.stdout), color=takes_color(sys.stdout))
    print(text if takes_unicode(sys.stdout) else to_ascii(text))
