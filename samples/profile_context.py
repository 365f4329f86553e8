"""Profile a part of your own program: the context-manager form.

    python samples/profile_context.py MODEL [--prompt-tokens N] [--new-tokens N] [--trace FOLDER]

MODEL is a folder or a name on the hub.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM

import phaseprof


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--trace", help="where the trace goes: a new or empty folder")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(arguments.model).to(device)
    vocabulary = model.get_input_embeddings().num_embeddings
    prompt = torch.randint(vocabulary, (1, arguments.prompt_tokens), device=device)

    with phaseprof.profile(model, trace=arguments.trace) as prof:
        for _ in range(3):
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=arguments.new_tokens,
            )

    report = prof.report()
    print(report)

    # The same figures as objects.
    print()
    for name, phase in report.phases.items():
        milliseconds = phase.pass_ms_p50
        print(f"{name}: {phase.bound.value}-bound, {milliseconds:.2f} ms a pass (median)")
    print(f"passes in the trace: {prof.trace.passes.num_rows} ({prof.trace_path})")


if __name__ == "__main__":
    main()
