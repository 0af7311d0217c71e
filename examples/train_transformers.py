"""Trains a small GPT-2 from random parameters with Transformers' Trainer. When workers are killed, it continues from
the last steps, which the agent's memory holds.

    elastic-agent --standalone --nproc-per-node=2 --max-restarts=3 train_transformers.py
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from elastic_agent.torch.transformers import ElasticCallback

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--save-steps", type=int, default=100, help="steps between the Trainer's own checkpoints")
parser.add_argument("--folder", default="checkpoints", help="where they are; all nodes share it")
options = parser.parse_args()

# Represents data of your own: sentences that count upwards, from anywhere.
sentences = [torch.arange(start % 50, start % 50 + 16) for start in range(800)]
dataset = [{"input_ids": sentence, "labels": sentence} for sentence in sentences]

torch.manual_seed(1)
config = GPT2Config(vocab_size=80, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
arguments = TrainingArguments(
    output_dir=options.folder,
    num_train_epochs=options.epochs,
    per_device_train_batch_size=8,
    # Without this, the ranks of a machine that has no GPU do not train together.
    use_cpu=not torch.cuda.is_available(),
    save_steps=options.save_steps,
    save_total_limit=2,
    logging_steps=20,
    report_to=[],
    disable_tqdm=True,
)
elastic = ElasticCallback()
trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=dataset, callbacks=[elastic])
begin = elastic.resume(trainer)
result = trainer.train(resume_from_checkpoint=begin)
if trainer.is_world_process_zero():
    print(f"step {trainer.state.global_step}: mean loss {result.training_loss:.3f}", flush=True)
