"""Serve prompts of different lengths with the continuous batching of transformers, and see what each step computed.

    python samples/continuous_batching.py MODEL [--requests N] [--new-tokens N] [--step-tokens N] [--trace FOLDER]

MODEL is a folder or a name on the hub. The last table shows how many tokens of a step are prompt and how many are
output, and the time of a token that shares its step with somebody's prompt beside that of one that does not.
"""

import argparse

import duckdb
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

import phaseprof

BY_PHASE = """
    select phase, count(*)::bigint as steps, round(avg(sequences), 1) as requests,
           sum(prefill_tokens)::bigint as prefill, sum(decode_tokens)::bigint as decode,
           round(median(host_ns) / 1e6, 2) as median_ms
    from read_parquet('{trace}/passes/**/*.parquet', hive_partitioning = true)
    group by phase order by phase
"""
LATENCY = """
    select split_part(request_id, ':', 2) as request, prompt_tokens as prompt, cached_tokens as cached,
           output_tokens as output, round(queue_ns / 1e6, 2) as queue_ms, round(ttft_ns / 1e6, 2) as ttft_ms,
           round(tpot_ns / 1e6, 2) as tpot_ms, finish
    from read_parquet('{trace}/requests/**/*.parquet', hive_partitioning = true)
    order by arrival_ns, request
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--step-tokens", type=int, default=64, help="tokens that a step may hold")
    parser.add_argument("--trace", help="where the trace goes: a new or empty folder")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(arguments.model).to(device)
    vocabulary = model.get_input_embeddings().num_embeddings
    # Every prompt begins with the same 32 tokens: from the second one on they are found in the cache.
    common = torch.randint(vocabulary, (32,)).tolist()
    prompts = [
        common + torch.randint(vocabulary, (8 * (1 + n % 5),)).tolist()
        for n in range(arguments.requests)
    ]

    with phaseprof.profile(model, trace=arguments.trace) as prof:
        outputs = model.generate_batch(
            prompts,
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=arguments.new_tokens, eos_token_id=-1
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=16, num_blocks=256, max_batch_tokens=arguments.step_tokens
            ),
        )

    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    print(f"{len(outputs)} requests, {tokens} tokens ({prof.trace_path})\n")
    print(duckdb.sql(LATENCY.format(trace=prof.trace_path)))
    print(duckdb.sql(BY_PHASE.format(trace=prof.trace_path)))


if __name__ == "__main__":
    main()
