"""TevatronTrainer as `tevatron.retriever.driver.train` builds it, which `examples/example_msmarco.md` recommends.

It gathers negatives from all ranks. Embeddings are pooled as the start model pools (mean) and normalised. Recommended
values that a training leaves open: learning rate 1e-5, 10 % warm-up, no weight decay, one worker (that example and the
defaults of TevatronTrainingArguments), temperature 0.01 for normalised vectors (README). With bf16 the driver also
keeps weights and optimizer in bf16; here they are fp32 as in the other libraries.
"""

import sys
from pathlib import Path

import torch
from tevatron.retriever.arguments import DataArguments, ModelArguments, TevatronTrainingArguments
from tevatron.retriever.collator import TrainCollator
from tevatron.retriever.dataset import TrainDataset
from tevatron.retriever.modeling import DenseModel
from tevatron.retriever.trainer import TevatronTrainer
from transformers import AutoTokenizer, set_seed

sys.path.insert(0, str(Path(__file__).parent))
from common import Training, end_process_group, read_training
from tevatron_data import write_data
from trainer import ReportSteps, arguments


def main(training: Training) -> None:
    """Train and save."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_args = TevatronTrainingArguments(
        **arguments(training, lr=1e-5, warmup=0.1, weight_decay=0.0, device=device)
        | {"output_dir": training.trained, "dataloader_num_workers": 1},
        warmup_ratio=0.1 if training.warmup is None else training.warmup,
    )
    model_args = ModelArguments(
        model_name_or_path=training.model,
        pooling="mean",
        normalize=True,
        temperature=training.temperature or 0.01,
    )
    set_seed(train_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(training.model)
    model = DenseModel.build(model_args, train_args, dtype=torch.float32, attn_implementation="sdpa")
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
    trainer = TevatronTrainer(
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
