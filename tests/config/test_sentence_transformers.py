"""What loss=sentence_transformers may be, as far as it is known before sentence-transformers is imported."""

import subprocess
import sys

import pytest

from embedtrain.config.losses import SentenceTransformersConfig
from embedtrain.config.row_requirements import SENTENCE_TRANSFORMERS_LOSSES, UNSUPPORTED_LOSSES
from embedtrain.config.sentence_transformers import FUNCTION_ARGUMENTS, LOSSES_WITH_GUIDE, check_sentence_transformers
from embedtrain.errors import ConfigError

INNER = {"class_name": "CoSENTLoss", "arguments": {"scale": 10}}


def matryoshka(loss: object = INNER, dims: object = (8, 4)) -> dict[str, object]:
    return {"loss": loss, "matryoshka_dims": dims}


@pytest.mark.parametrize("name", SENTENCE_TRANSFORMERS_LOSSES)
def test_every_class(name):
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
        SentenceTransformersConfig(class_name="TripletLoss", matryoshka_dims=[8, 4]),
    ],
)
def test_allowed(config):
    check_sentence_transformers(config)


def case(sentence: str, class_name: str, **options: object) -> object:
    return pytest.param(SentenceTransformersConfig(class_name=class_name, **options), sentence, id=sentence)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        case(r"loss\.class_name is missing: set it to one of MultipleNegativesRankingLoss, .*MatryoshkaLoss$", ""),
        case(r"loss\.class_name=CosentLoss: .*, did you mean CoSENTLoss\? There are ", "CosentLoss"),
        case(r"loss\.class_name=x: embedtrain knows no such class\. There are ", "x"),
        *(case(f"{name} needs {what}, and a loss here sees", name) for name, what in UNSUPPORTED_LOSSES.items()),
        case(r"loss\.arguments\.model=x: the model is the recipe's", "CoSENTLoss", arguments={"model": "x"}),
        case(
            r"loss\.arguments\.gather_across_devices=True: the batch of all ranks is gathered",
            "MultipleNegativesRankingLoss",
            arguments={"gather_across_devices": True},
        ),
        case(r"arguments\.guide=x: the guide is set beside class_name", "GISTEmbedLoss", arguments={"guide": "x"}),
        case("it is a function, and YAML", "CosineSimilarityLoss", arguments={"loss_fct": "torch.nn.L1Loss"}),
        case(
            r"arguments\.cos_score_transformation=x: it is a function",
            "CosineSimilarityLoss",
            arguments={"cos_score_transformation": "x"},
        ),
        case(
            r"loss\.arguments\.similarity_fct=os\.system: .* takes one of cos_sim, dot_score, euclidean_sim",
            "MultipleNegativesRankingLoss",
            arguments={"similarity_fct": "os.system"},
        ),
        case(
            r"similarity_fct=cos_sim: CoSENTLoss takes one of pairwise_cos_sim",
            "CoSENTLoss",
            arguments={"similarity_fct": "cos_sim"},
        ),
        case(r"distance_metric=\['x'\]: Tr", "TripletLoss", arguments={"distance_metric": ["x"]}),
        case(r"loss\.class_name=GISTEmbedLoss needs a guide: set loss\.guide", "GISTEmbedLoss"),
        case(
            r"loss\.guide=some/guide is for GISTEmbedLoss and .*; CoSENTLoss has no", "CoSENTLoss", guide="some/guide"
        ),
        case(r"loss\.matryoshka_dims=\[4\]: MSELoss takes whole vectors", "MSELoss", matryoshka_dims=[4]),
        case("MatryoshkaLoss shortens vectors itself", "MatryoshkaLoss", arguments=matryoshka(), matryoshka_dims=[4]),
        case(r"loss\.arguments\.loss=None: MatryoshkaLoss takes a mapping such as", "MatryoshkaLoss"),
        case("loss='CoSENTLoss': MatryoshkaLoss takes a mapping", "MatryoshkaLoss", arguments=matryoshka("CoSENTLoss")),
        case("takes a mapping such as {", "MatryoshkaLoss", arguments=matryoshka({**INNER, "guide": "x"})),
        case("another class, not itself", "MatryoshkaLoss", arguments=matryoshka({"class_name": "MatryoshkaLoss"})),
        case(
            r"loss\.arguments\.loss\.class_name=Cosent: .*did you mean",
            "MatryoshkaLoss",
            arguments=matryoshka({"class_name": "Cosent"}),
        ),
        case(
            r"loss\.arguments\.loss\.arguments=\[1\]: it is a mapping",
            "MatryoshkaLoss",
            arguments=matryoshka({"class_name": "MSELoss", "arguments": [1]}),
        ),
        case(
            r"loss\.arguments\.loss\.arguments\.projection_dim=4: a projection takes whole",
            "MatryoshkaLoss",
            arguments=matryoshka({"class_name": "MSELoss", "arguments": {"projection_dim": 4}}),
        ),
        case("its classifier takes whole", "MatryoshkaLoss", arguments=matryoshka({"class_name": "SoftmaxLoss"})),
        case(
            "it has several parts",
            "MatryoshkaLoss",
            arguments=matryoshka({"class_name": "GlobalOrthogonalRegularizationLoss"}),
        ),
        case(
            "class_name=GISTEmbedLoss needs a guide",
            "MatryoshkaLoss",
            arguments=matryoshka({"class_name": "GISTEmbedLoss"}),
        ),
        case("matryoshka_dims=None: a list of dim", "MatryoshkaLoss", arguments={"loss": INNER}),
        case(r"matryoshka_dims=\[\]: a list of dim", "MatryoshkaLoss", arguments=matryoshka(dims=[])),
        case(r"matryoshka_dims=\[8, '4'\]: a list", "MatryoshkaLoss", arguments=matryoshka(dims=[8, "4"])),
        case(r"matryoshka_dims=\[8, 0\]: a list", "MatryoshkaLoss", arguments=matryoshka(dims=[8, 0])),
    ],
)
def test_refused(config, sentence):
    with pytest.raises(ConfigError, match=sentence) as error:
        check_sentence_transformers(config)
    assert "\n" not in str(error.value)


def test_option_within_others():
    config = SentenceTransformersConfig(class_name="CoSENTLoss", arguments={"model": "x"})
    with pytest.raises(ConfigError, match=r"^loss\.losses\[1\]\.arguments\.model=x"):
        check_sentence_transformers(config, "loss.losses[1]")


def test_functions_belong_to_known_classes():
    assert set(FUNCTION_ARGUMENTS) <= set(SENTENCE_TRANSFORMERS_LOSSES)


def test_torch_is_not_imported():
    program = "import embedtrain.config.sentence_transformers, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
