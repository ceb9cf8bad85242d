"""Errors for the user: each has one sentence with what is wrong and what to write instead."""


class EmbedtrainError(Exception):
    """An error that the user can cause and fix. Commands print its message without a traceback."""

    reporting_rank: int | None = None  # the rank that prints it, if the ranks have agreed on one; -1 is none
    exit_code: int = 1  # of the process


class ConfigError(EmbedtrainError):
    """A recipe, an option or a combination of options that cannot work."""


class DataError(EmbedtrainError):
    """A file or a row that cannot be read; the message names file and line."""


class HubUnavailable(DataError):
    """A data set of the Hugging Face Hub that is not cached, while the Hub cannot be reached."""


class ModelError(EmbedtrainError):
    """A model that cannot be opened, or that embedtrain cannot train."""


class CheckpointError(EmbedtrainError):
    """A checkpoint that cannot be written, read or resumed from."""


class UnreadableError(EmbedtrainError):
    """A disk that fails to read a file, which may be intact: whoever catches damage does not catch this."""


class TrainingError(EmbedtrainError):
    """Training cannot continue: a loss or gradient is not finite, or a rank failed."""


class OutOfMemory(EmbedtrainError):
    """The memory of a device is exhausted; the message names the options to lower."""


class LaunchError(EmbedtrainError):
    """A scheduler that is missing, or that rejects a job."""


class FailedElsewhere(TrainingError):
    """Another rank failed and reports why."""


class LostContact(TrainingError):
    """Another rank ended or stopped answering; `said` replaces the whole message if the lost rank is known."""

    def __init__(self, reason: str, what: str | None = None, *, said: str | None = None) -> None:
        super().__init__(
            said
            or f"lost contact with another rank{f' while {what}' if what else ''}: "
            f"it ended or stopped answering ({reason}); its own output says why"
        )
        self.reason, self.what, self.said = reason, what, said


class EvaluationInterrupted(Exception):
    """An evaluation that ends early because a signal stops the run."""


class Stopped(Exception):
    """A signal stopped the run, on all ranks after the same step. No work is lost."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code
