"""RerankerTrainer of Tevatron, as `tevatron.reranker.driver.train` builds it and `examples/reranker` recommends.

The loss is the softmax cross-entropy over the positive and the negatives of each row, so it needs negatives; a pair is
one text without a separator. Recommended values that a training leaves open: learning rate 5e-6, no warm-up, no weight
decay. The driver cannot resume.
"""

import sys
from pathlib import Path

import torch
from tevatron.reranker.arguments import DataArguments, ModelArguments
from tevatron.reranker.collator import RerankerTrainCollator
from tevatron.reranker.dataset import RerankerTrainDataset
from tevatron.reranker.modeling import RerankerModel
from tevatron.reranker.trainer import RerankerTrainer
from transformers import AutoTokenizer, TrainingArguments, set_seed

sys.path.insert(0, str(Path(__file__).parent))
from common import Training, end_process_group, read_training
from tevatron_data import write_data
from trainer import ReportSteps, arguments


def main(training: Training) -> None:
    """Train and save."""
    if training.resume:
        raise SystemExit("Tevatron's driver of rerankers has no way to resume a training.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args = arguments(training, lr=5e-6, warmup=0.0, weight_decay=0.0, device=device)
    train_args = TrainingArguments(**args | {"output_dir": training.trained})
    set_seed(train_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(training.model)
    model_args = ModelArguments(model_name_or_path=training.model)
    model = RerankerModel.build(model_args, train_args, dtype=torch.float32)
    with train_args.main_process_first():
        data_args = DataArguments(
            dataset_path=write_data(training),
            dataset_cache_dir=str(Path(training.output) / "data"),
            train_group_size=1 + training.negatives,
            rerank_max_len=training.query_max_length + training.document_max_length,
            pad_to_multiple_of=16 if device == "cuda" else None,
        )
        dataset = RerankerTrainDataset(data_args)
    trainer = RerankerTrainer(
        model=model,
        args=train_args,
        train_dataset=dataset,
        data_collator=RerankerTrainCollator(data_args, tokenizer),
        processing_class=tokenizer,
        callbacks=[ReportSteps(training)],
    )
    dataset.trainer = trainer
    trainer.train()
    trainer.save_model()
    training.report("end", training.steps)
    end_process_group()


if __name__ == "__main__":
    main(read_training())
