"""The table of commands. Nothing here imports torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        name: what follows `embedtrain`, or `python -m embedtrain`.
        module: its `__main__` runs it.
        summary: its line in the overview.
        has_ranks: whether several processes may run it together, one per GPU.
    """

    name: str
    module: str
    summary: str
    has_ranks: bool = False


COMMANDS = {
    command.name: command
    for command in (
        Command("train", "embedtrain", "train a model; the same command resumes it", has_ranks=True),
        Command(
            "evaluate", "embedtrain.commands.evaluate", "measure a model on evaluation sets or MTEB", has_ranks=True
        ),
        Command("mine", "embedtrain.commands.mine", "mine hard negatives for training data", has_ranks=True),
        Command(
            "filter", "embedtrain.commands.filter", "keep the training rows whose positives rank high", has_ranks=True
        ),
        Command(
            "vectors",
            "embedtrain.commands.vectors",
            "compute a teacher's vectors of training data once",
            has_ranks=True,
        ),
        Command("search", "embedtrain.commands.search", "search a corpus with a model"),
        Command("export", "embedtrain.commands.export", "write a model directory from a checkpoint"),
        Command("verify", "embedtrain.commands.verify", "compare the vectors of serving engines with those of a model"),
        Command("merge", "embedtrain.commands.merge", "merge the weights of several models", has_ranks=True),
        Command("calibrate", "embedtrain.commands.calibrate", "prepare vectors for compression", has_ranks=True),
        Command("inspect", "embedtrain.commands.inspect", "show how data is read, cut and batched"),
        Command("prune", "embedtrain.commands.prune", "make a smaller model from some of a model's layers"),
        Command(
            "trim", "embedtrain.commands.trim", "make a smaller model without the tokens that a corpus does not use"
        ),
        Command("static", "embedtrain.commands.static", "make a static embedding model from a model", has_ranks=True),
        Command("split", "embedtrain.commands.split", "hold out queries of training data as an evaluation set"),
        Command("plan", "embedtrain.commands.plan", "estimate memory, strategy and time before a GPU is booked"),
        Command("report", "embedtrain.commands.report", "write an HTML page about one run or several"),
        Command(
            "doctor", "embedtrain.commands.doctor", "check whether this machine is ready for training", has_ranks=True
        ),
        Command("submit", "embedtrain.commands.submit", "submit a training to a cluster"),
    )
}
