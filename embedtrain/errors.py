"""The errors meant for the user: each carries one sentence that says what is wrong and what to write instead."""


class EmbedtrainError(Exception):
    """Root of the errors a user can cause and mend. The doors print its text alone, without a traceback."""


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


class FailedElsewhere(TrainingError):
    """Another rank failed and said why; this one only follows."""


class LostContact(TrainingError):
    """Another rank ended or stopped answering, and this one cannot go on without it.

    Args:
        reason: what the network said.
        what: was being done, if that is known.
    """

    def __init__(self, reason: str, what: str | None = None) -> None:
        super().__init__(
            f"lost contact with another rank{f' while {what}' if what else ''}: "
            f"it ended or stopped answering ({reason}); its own output says why"
        )
        self.reason = reason
