"""Profile a part of a program that runs vLLM offline: the context-manager form.

    python samples/vllm_offline.py MODEL [--requests N] [--new-tokens N] [--step-tokens N] [--trace FOLDER] [--random]

MODEL is a folder or a name on the hub; with --random its config alone is read. The requests have prompts of
different lengths and share their first tokens; --step-tokens is small, so that a long prompt is computed in chunks
beside requests that decode. Each request is shown with the step that made its slowest token.
"""

import argparse
import os

import pyarrow.compute as pc

import phaseprof


def prompt(length: int, first: int, number: int, vocabulary: int) -> list[int]:
    """Tokens of which all prompts share the first 32; the rest is this one's own."""
    places = (place if place < 32 else place * (number + 2) for place in range(length))
    return [3 + (first + place) % (vocabulary - 3) for place in places]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--step-tokens", type=int, default=64)
    parser.add_argument("--trace", help="where the trace goes: a new or empty folder")
    parser.add_argument("--random", action="store_true", help="random weights, nothing is loaded")
    arguments = parser.parse_args()

    # Less noise on the terminal. Both are read by vLLM when it is imported.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    longest = 32 + 16 * arguments.requests
    llm = LLM(
        arguments.model,
        load_format="dummy" if arguments.random else "auto",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=longest + arguments.new_tokens,
        max_num_batched_tokens=arguments.step_tokens,
        max_num_seqs=arguments.requests,
        block_size=32,
        kv_cache_memory_bytes=1 << 28,
    )
    vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def prompts(first: int) -> list[dict[str, list[int]]]:
        lengths = range(48, longest + 1, 16)
        return [
            {"prompt_token_ids": prompt(length, first, number, vocabulary)}
            for number, length in enumerate(lengths)
        ]

    sampling = SamplingParams(
        temperature=0.0, max_tokens=arguments.new_tokens, ignore_eos=True, detokenize=False
    )

    # The engine core and the workers are other processes; the block reaches into them.
    with phaseprof.profile(llm, trace=arguments.trace) as prof:
        with phaseprof.warmup():
            llm.generate(prompts(1), sampling, use_tqdm=False)
        llm.generate(prompts(0), sampling, use_tqdm=False)

    print(prof.report())

    print()
    passes = prof.trace.passes
    requests = prof.trace.requests.filter(pc.field("warmup").is_null())
    print("prompt  cached  output  TTFT ms  slowest token ms  its step")
    for row in requests.sort_by("arrival_ns").to_pylist():
        slowest = max(row["itl_ns"], default=0)
        where = ""
        if row["itl_ns"]:
            step = row["itl_steps"][row["itl_ns"].index(slowest)]
            # One row for each rank of a tensor-parallel engine, all alike.
            (made, *_) = passes.filter(pc.field("step") == step).to_pylist()
            where = f"{made['phase']}, {made['prefill_tokens']} + {made['decode_tokens']} tokens"
        print(
            f"{row['prompt_tokens']:6}  {row['cached_tokens']:6}  {row['output_tokens']:6}  "
            f"{row['ttft_ns'] / 1e6:7.2f}  {slowest / 1e6:16.2f}  {where}"
        )
    print(f"steps in the trace: {passes.num_rows} ({prof.trace_path})")


if __name__ == "__main__":
    main()
