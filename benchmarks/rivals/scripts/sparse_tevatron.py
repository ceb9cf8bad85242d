"""SpladeModel and SpladeTrainer of Tevatron, as `examples/splade` recommends.

It gathers negatives from all ranks, and the FLOPS loss is that of all ranks' rows. Its weight rises over the first
third of the steps; the trainer's default of 1,000 steps is longer than a training. Recommended values that a training
leaves open: learning rate 5e-6, 10 % warm-up, no weight decay, temperature 1, FLOPS weights 0.01 and 0.01, 8 workers.
"""

import sys
from pathlib import Path

import torch
from tevatron.retriever.arguments import DataArguments, ModelArguments, SpladeTrainingArguments
from tevatron.retriever.collator import TrainCollator
from tevatron.retriever.dataset import TrainDataset
from tevatron.retriever.modeling import SpladeModel
from tevatron.retriever.splade_trainer import SpladeTrainer
from transformers import AutoTokenizer, set_seed

sys.path.insert(0, str(Path(__file__).parent))
from common import Training, end_process_group, read_training
from tevatron_data import write_data
from trainer import ReportSteps, arguments


def main(training: Training) -> None:
    """Train and save."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_args = SpladeTrainingArguments(
        **arguments(training, lr=5e-6, warmup=0.1, weight_decay=0.0, device=device)
        | {"output_dir": training.trained, "dataloader_num_workers": 8 if device == "cuda" else 1},
        warmup_ratio=0.1 if training.warmup is None else training.warmup,
        q_flops_loss_factor=0.01,
        p_flops_loss_factor=0.01,
        flops_warmup=max(1, training.steps // 3),
    )
    model_args = ModelArguments(model_name_or_path=training.model, temperature=training.temperature or 1.0)
    set_seed(train_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(training.model)
    model = SpladeModel.build(model_args, train_args, dtype=torch.float32, attn_implementation="sdpa")
    with train_args.main_process_first():
        data_args = DataArguments(
            dataset_path=write_data(training),
            dataset_cache_dir=str(Path(training.output) / "data"),
            train_group_size=1 + training.negatives,
            query_max_len=training.query_max_length,
            passage_max_len=training.document_max_length,
            pad_to_multiple_of=16 if device == "cuda" else None,
        )
        dataset = TrainDataset(data_args)
    trainer = SpladeTrainer(
        model=model,
        args=train_args,
        train_dataset=dataset,
        data_collator=TrainCollator(data_args, tokenizer),
        callbacks=[ReportSteps(training)],
    )
    dataset.set_trainer(trainer)
    trainer.train(resume_from_checkpoint=training.resume)
    trainer.save_model()
    if trainer.is_world_process_zero():
        tokenizer.save_pretrained(training.trained)
    training.report("end", training.steps)
    end_process_group()


if __name__ == "__main__":
    main(read_training())
