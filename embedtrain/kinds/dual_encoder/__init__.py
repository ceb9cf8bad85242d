"""model.kind=dual_encoder: a vector per text, of queries by one model and of documents by another."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedtrain.config.validation import model_option, tower_options_named
from embedtrain.kinds.dense import Dense
from embedtrain.kinds.dual_encoder.options import ROLES, DualEncoderOptions, check_dual_encoder, check_export_options

if TYPE_CHECKING:
    from embedtrain.config.recipe import ModelConfig, Recipe
    from embedtrain.formats.model_files import ModelFiles
    from embedtrain.losses.score import Score
    from embedtrain.models.types import ModelSource


class DualEncoder(Dense):
    """A vector per text, by a tower for queries and a tower for documents, each of which is a dense model."""

    name = "dual_encoder"
    summary = "a vector per text, by one model for queries and another for documents"
    aliases = ("twotower", "twotowers", "towers", "router", "asymmetric")
    options = DualEncoderOptions
    command_options = ("normalize", "similarity")
    has_tables = False
    has_one_model = False

    def dimension(self, source: "ModelSource") -> int:
        """The same of both towers."""
        return next(iter(source.towers.values())).dimension

    def outputs(self, source: "ModelSource") -> str:
        """Those of both towers."""
        return "; ".join(f"{role}: {tower.kind.outputs(tower)}" for role, tower in source.towers.items())

    def compared_settings(self, source: "ModelSource") -> dict[str, Any]:
        """All settings of both towers."""
        from embedtrain.formats.source import all_settings

        return {
            f"{role}: {name}": value
            for role, tower in source.towers.items()
            for name, value in all_settings(tower).items()
        }

    def check_options(self, model: Any) -> None:
        """Values and combinations."""
        check_dual_encoder(model)

    def with_any_pooling(self, model: Any) -> Any:
        """As they are: the files of towers define a pooling, or the options do."""
        return model

    def check_other_options(self, recipe: "Recipe") -> None:
        """What needs a model with one tower."""
        check_export_options(recipe.export, "export.")

    def recognise(self, directory: Path) -> str | None:
        """A Router of sentence-transformers whose routes are dense models."""
        from embedtrain.formats.sentence_transformers import has_dense_routes, read_routes

        if not (directory / "modules.json").is_file():
            return None
        is_dual = has_dense_routes(read_routes(directory))
        return "a dual encoder, with a tower for queries and one for documents (Router)" if is_dual else None

    def require_other(self, directory: Path, what: str, model: "ModelConfig") -> None:
        """None of the towers is the model."""
        from embedtrain.errors import ConfigError

        raise ConfigError(
            f"{model_option('kind')}={model.kind}: {directory} is {what}; write {model_option('kind')}=dual_encoder, "
            "or the directory of one "
            f"tower as {model_option('path')}"
        )

    def read(self, directory: Path, model: Any) -> "ModelSource":
        """A Router."""
        from embedtrain.errors import ConfigError
        from embedtrain.kinds.dual_encoder.files import read

        if self.recognise(directory) is None:
            raise ConfigError(
                f"{model_option('path')}={model.path}: has no Router with a model for queries and one for documents; "
                "write "
                "model.query.path and model.document.path for two models"
            )
        return read(self, directory, model)

    def with_models(self, model: Any, change: Callable[[Any], Any]) -> Any:
        """Those of the towers, unless one directory has both."""
        if model.path is not None:
            return change(model)
        towers = {}
        for role in ROLES:
            with tower_options_named(role):
                towers[role] = change(getattr(model, role))
        return replace(model, **towers) if any(towers[role] is not getattr(model, role) for role in ROLES) else model

    def assembled(self, model: Any) -> "ModelSource | None":
        """Two models."""
        from embedtrain.kinds.dual_encoder.files import assembled

        return assembled(self, model) if model.path is None else None

    def score(self, source: "ModelSource") -> "Score":
        """The similarity of two vectors, of which one is a query's."""
        score = super().score(source)
        score.is_symmetric = False
        return score

    def identity(self, source: "ModelSource") -> dict[str, Any]:
        """The settings of the towers."""
        from embedtrain.models.pooling import pooling_name

        return {
            "towers": {
                role: [
                    pooling_name(tower.vectors.pooling),
                    tower.vectors.normalize,
                    tower.vectors.include_prompt,
                    tower.tokenization.lowercase,
                ]
                for role, tower in source.towers.items()
            }
        }

    @property
    def files(self) -> "ModelFiles":
        """See `kinds/dual_encoder/files.py`."""
        from embedtrain.kinds.dual_encoder.files import DualEncoderFiles

        return DualEncoderFiles()
