"""`torchrun -m embedtrain.evaluate model=DIR sets=[...]`: evaluate a model, sharded over all ranks."""

from embedtrain.config.compose import compose_evaluate
from embedtrain.config.door_options import EvaluateOptions
from embedtrain.door import enter


def act(options: EvaluateOptions) -> None:
    """Load the model onto the ranks, measure it on every set, print a table, add rows to metrics.jsonl."""
    from pathlib import Path

    from embedtrain.config.schema import ModelConfig, ParallelConfig
    from embedtrain.distributed.world import joined_world
    from embedtrain.evaluation.encode import SentenceEncoder
    from embedtrain.evaluation.evaluator import Evaluator
    from embedtrain.evaluation.sets import load_sets
    from embedtrain.tracking.console import Console
    from embedtrain.tracking.metrics import MetricsFile
    from embedtrain.tracking.tracker import METRICS_FILE
    from embedtrain.training.model import load_model

    with joined_world(options.timeout) as world:
        console = Console(speaks=world.is_main)
        sets = load_sets(options.sets, world)
        for note in (note for loaded in sets for note in loaded.notes):
            console.note(note)
        model = load_model(
            ModelConfig(
                path=options.model,
                pooling=options.pooling,
                normalize=options.normalize,
                max_length=options.max_length,
                query_prompt=options.query_prompt,
                document_prompt=options.document_prompt,
                revision=options.revision,
                trust_remote_code=options.trust_remote_code,
            ),
            ParallelConfig(precision=options.precision),
            world,
            seed=0,
        )
        for note in model.notes:
            console.note(note)
        encoder = SentenceEncoder(
            model.encoder,
            model.tokenizer,
            world,
            chunk_tokens=options.chunk_tokens,
            query_prompt=model.source.prompts.get("query", ""),
            document_prompt=model.source.prompts.get("document", ""),
        )
        output_dir = Path(options.output_dir)
        with world.together("making the output directory"):
            output_dir.mkdir(parents=True, exist_ok=True)
        evaluator = Evaluator(sets, encoder, world, depth=options.depth)
        with console.phase(f"evaluating {options.model}"):
            figures = evaluator.evaluate(save_runs=output_dir / "runs" if options.save_runs else None)
        console.evaluation(0, figures, title=f"evaluation of {options.model}")
        with world.together("writing metrics.jsonl"):
            if world.is_main:
                metrics = MetricsFile(output_dir / METRICS_FILE)
                for name, values in figures.items():
                    metrics.append({"step": 0, "set": name, "model": options.model, **values})
                metrics.close()
                console.note(f"rows added to {output_dir / METRICS_FILE}")


if __name__ == "__main__":
    enter(compose_evaluate, act)
