"""vLLM: its engine steps, seen from outside.

Nothing here imports vLLM. Its modules are awaited (`phaseprof.hooks.imports`) and some methods of their classes are
wrapped for the time of a session; `phaseprof.vllm.hookset` is what a session holds.
"""
