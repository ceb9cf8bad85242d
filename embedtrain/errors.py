"""The errors meant for the user: each carries one sentence that says what is wrong and what to write instead."""


class EmbedtrainError(Exception):
    """Root of the errors a user can cause and mend. The doors print its text alone, without a traceback.

    Attributes:
        reporting_rank: the rank that tells the user, where ranks have agreed on one.
        exit_code: what the process ends with.
    """

    reporting_rank: int | None = None
    exit_code: int = 1


class ConfigError(EmbedtrainError):
    """A recipe, an option or a combination of options that cannot work."""


class DataError(EmbedtrainError):
    """A file or a row that cannot be read as what it claims to be; the text names file and line."""


class ModelError(EmbedtrainError):
    """A model directory that cannot be opened, or that holds something embedtrain cannot train."""


class CheckpointError(EmbedtrainError):
    """A checkpoint that cannot be written, read or continued from."""


class TrainingError(EmbedtrainError):
    """Training cannot go on: a loss or gradient that is not finite, a rank that failed."""


class LaunchError(EmbedtrainError):
    """A scheduler that is not there, or that refuses a job."""


class FailedElsewhere(TrainingError):
    """Another rank failed and said why; this one only follows."""


class LostContact(TrainingError):
    """Another rank ended or stopped answering, and this one cannot go on without it.

    Args:
        reason: what the network said.
        what: was being done, if that is known.
        said: the whole sentence, where it is known which rank that is.
    """

    def __init__(self, reason: str, what: str | None = None, *, said: str | None = None) -> None:
        super().__init__(
            said
            or f"lost contact with another rank{f' while {what}' if what else ''}: "
            f"it ended or stopped answering ({reason}); its own output says why"
        )
        self.reason, self.what, self.said = reason, what, said


class EvaluationInterrupted(Exception):
    """An evaluation that was left because the run is asked to stop."""


class Stopped(Exception):
    """The run ended because a signal asked for it, on all ranks after the same step. No error: nothing is lost.

    Args:
        text: a line for the user.
        exit_code: what the process ends with.
    """

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code
