"""Share questions between the ranks of a job: each has the whole model and answers its part of them.

    phaseprof run -o trace -- torchrun --nproc-per-node 2 samples/torchrun_data_parallel.py MODEL
    phaseprof report trace

MODEL is a folder or a name on the hub. The report has a section on ranks: who is slower, and how far apart they run.
"""

import argparse
import os

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = (
    "What is the capital of France?",
    "How many legs does a spider have?",
    "Name the first three prime numbers.",
    "Which gas do plants take in?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.bfloat16 if on_gpu else torch.float32
    ).to(device)

    answers = {}
    for number in range(rank, len(QUESTIONS), ranks):
        inputs = tokenizer(QUESTIONS[number], return_tensors="pt").to(device)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=arguments.new_tokens)
        answer = output[0, inputs["input_ids"].shape[1] :]
        answers[number] = tokenizer.decode(answer, skip_special_tokens=True).strip()

    gathered = [None] * ranks
    dist.all_gather_object(gathered, answers)
    if rank == 0:
        for number, question in enumerate(QUESTIONS):
            print(f"> {question}\n{gathered[number % ranks][number]}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
