"""From raw events to rows: labels, work and requests are derived here, in the order of the events.

It runs on the recorder's thread. Three kinds of batches are told apart: a generate call (its prompt is known before the
first pass), a hand-written loop on a cache (the cache tells), and one without a cache (only the shapes tell). A row
that later events may change is put at once and put again when it is settled, so that a kill never loses it.
"""
