"""Checks of loss=sentence_transformers, which import neither sentence-transformers nor torch."""

import subprocess
import sys

import pytest

from embedtrain.config.evaluation import VectorPrecision
from embedtrain.config.loss_checks import FUNCTION_ARGUMENTS, LOSSES_WITH_GUIDE, check_sentence_transformers
from embedtrain.config.losses import MatryoshkaConfig, SentenceTransformersConfig
from embedtrain.config.row_requirements import SENTENCE_TRANSFORMERS_LOSSES, UNSUPPORTED_LOSSES
from embedtrain.errors import ConfigError

INNER = {"class_name": "CoSENTLoss", "arguments": {"scale": 10}}


def matryoshka(loss: object = INNER, dims: object = (8, 4)) -> dict[str, object]:
    return {"loss": loss, "matryoshka_dims": dims}


@pytest.mark.parametrize("name", SENTENCE_TRANSFORMERS_LOSSES)
def test_every_class_passes(name):
    guide = "some/guide" if name in LOSSES_WITH_GUIDE else None
    check_sentence_transformers(SentenceTransformersConfig(class_name=name, guide=guide))


@pytest.mark.parametrize(
    "config",
    [
        SentenceTransformersConfig(class_name="MatryoshkaLoss", arguments=matryoshka()),
        SentenceTransformersConfig(class_name="MatryoshkaLoss", arguments=matryoshka({"class_name": "MSELoss"}, [4])),
        SentenceTransformersConfig(
            class_name="MatryoshkaLoss", arguments=matryoshka({"class_name": "GISTEmbedLoss"}), guide="some/guide"
        ),
        SentenceTransformersConfig(class_name="CoSENTLoss", arguments={"similarity_fct": "pairwise_angle_sim"}),
        SentenceTransformersConfig(class_name="CachedMultipleNegativesRankingLoss", arguments={"mini_batch_size": 8}),
        SentenceTransformersConfig(class_name="EmbedDistillLoss", arguments={"distance_metric": "l2"}),
        SentenceTransformersConfig(class_name="TripletLoss", matryoshka=MatryoshkaConfig(dims=[8, 4])),
    ],
)
def test_options_that_pass(config):
    check_sentence_transformers(config)


def case(pattern: str, class_name: str, **options: object) -> object:
    return pytest.param(SentenceTransformersConfig(class_name=class_name, **options), pattern, id=pattern)


@pytest.mark.parametrize(
    ("config", "pattern"),
    [
        case(r"loss\.class_name .* MultipleNegativesRankingLoss, .*MatryoshkaLoss$", ""),
        case(r"loss\.class_name=CosentLoss: .*, did you mean CoSENTLoss\?", "CosentLoss"),
        case(r"loss\.class_name=x: ", "x"),
        *(case(f"class_name={name}: needs {requirement}", name) for name, requirement in UNSUPPORTED_LOSSES.items()),
        case(r"loss\.arguments\.model=x: ", "CoSENTLoss", arguments={"model": "x"}),
        case(
            r"loss\.arguments\.gather_across_devices=true: ",
            "MultipleNegativesRankingLoss",
            arguments={"gather_across_devices": True},
        ),
        case(r"arguments\.guide=x: ", "GISTEmbedLoss", arguments={"guide": "x"}),
        case(
            r"arguments\.loss_fct=torch\.nn\.L1Loss: ",
            "CosineSimilarityLoss",
            arguments={"loss_fct": "torch.nn.L1Loss"},
        ),
        case(
            r"arguments\.cos_score_transformation=x: ",
            "CosineSimilarityLoss",
            arguments={"cos_score_transformation": "x"},
        ),
        case(
            r"loss\.arguments\.similarity_fct=os\.system: .* cos_sim, dot_score, euclidean_sim",
            "MultipleNegativesRankingLoss",
            arguments={"similarity_fct": "os.system"},
        ),
        case(
            r"similarity_fct=cos_sim: .*pairwise_cos_sim",
            "CoSENTLoss",
            arguments={"similarity_fct": "cos_sim"},
        ),
        case(r"distance_metric=\[x\]: ", "TripletLoss", arguments={"distance_metric": ["x"]}),
        case(r"loss\.guide=null: GISTEmbedLoss", "GISTEmbedLoss"),
        case(r"loss\.guide=some/guide: .*GISTEmbedLoss.*CoSENTLoss", "CoSENTLoss", guide="some/guide"),
        case(
            r"loss\.matryoshka\.precisions=.*: MatryoshkaLoss .*write loss\.matryoshka\.dims",
            "MatryoshkaLoss",
            arguments=matryoshka(),
            matryoshka=MatryoshkaConfig(precisions=[VectorPrecision.binary]),
        ),
        case(r"loss\.matryoshka\.dims=\[4\]: MSELoss", "MSELoss", matryoshka=MatryoshkaConfig(dims=[4])),
        case(
            r"loss\.matryoshka\.dims=\[4\]: MatryoshkaLoss",
            "MatryoshkaLoss",
            arguments=matryoshka(),
            matryoshka=MatryoshkaConfig(dims=[4]),
        ),
        case(r"loss\.arguments\.loss=None: .*mapping", "MatryoshkaLoss"),
        case("loss='CoSENTLoss': .*mapping", "MatryoshkaLoss", arguments=matryoshka("CoSENTLoss")),
        case("guide.*: .* mapping such as {", "MatryoshkaLoss", arguments=matryoshka({**INNER, "guide": "x"})),
        case(
            r"arguments\.loss\.class_name=MatryoshkaLoss: ",
            "MatryoshkaLoss",
            arguments=matryoshka({"class_name": "MatryoshkaLoss"}),
        ),
        case(
            r"loss\.arguments\.loss\.class_name=Cosent: .*did you mean",
            "MatryoshkaLoss",
            arguments=matryoshka({"class_name": "Cosent"}),
        ),
        case(
            r"loss\.arguments\.loss\.arguments=\[1\]: .*mapping",
            "MatryoshkaLoss",
            arguments=matryoshka({"class_name": "MSELoss", "arguments": [1]}),
        ),
        case(
            r"loss\.arguments\.loss\.arguments\.projection_dim=4: ",
            "MatryoshkaLoss",
            arguments=matryoshka({"class_name": "MSELoss", "arguments": {"projection_dim": 4}}),
        ),
        case("class_name=SoftmaxLoss: ", "MatryoshkaLoss", arguments=matryoshka({"class_name": "SoftmaxLoss"})),
        case(
            "class_name=GlobalOrthogonalRegularizationLoss: ",
            "MatryoshkaLoss",
            arguments=matryoshka({"class_name": "GlobalOrthogonalRegularizationLoss"}),
        ),
        case(
            r"loss\.guide=null: GISTEmbedLoss",
            "MatryoshkaLoss",
            arguments=matryoshka({"class_name": "GISTEmbedLoss"}),
        ),
        case("matryoshka_dims=None: ", "MatryoshkaLoss", arguments={"loss": INNER}),
        case(r"matryoshka_dims=\[\]: ", "MatryoshkaLoss", arguments=matryoshka(dims=[])),
        case(r"matryoshka_dims=\[8, '4'\]: ", "MatryoshkaLoss", arguments=matryoshka(dims=[8, "4"])),
        case(r"matryoshka_dims=\[8, 0\]: ", "MatryoshkaLoss", arguments=matryoshka(dims=[8, 0])),
    ],
)
def test_a_rejected_option_is_named_with_its_value(config, pattern):
    with pytest.raises(ConfigError, match=pattern) as caught:
        check_sentence_transformers(config)
    assert "\n" not in str(caught.value)


def test_a_part_of_a_combination_is_named():
    config = SentenceTransformersConfig(class_name="CoSENTLoss", arguments={"model": "x"})
    with pytest.raises(ConfigError, match=r"^loss\.losses\[1\]\.arguments\.model=x"):
        check_sentence_transformers(config, "loss.losses[1]")


def test_functions_belong_to_supported_classes():
    assert set(FUNCTION_ARGUMENTS) <= set(SENTENCE_TRANSFORMERS_LOSSES)


def test_torch_is_not_imported():
    program = "import embedtrain.config.loss_checks, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
