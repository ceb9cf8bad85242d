"""The stages of a pipeline are composed and checked before the first one runs."""

import re
import shutil
from types import SimpleNamespace

import pytest
import yaml

from embedtrain.commands.plan import PlanOptions, compose_pipeline_plan, plan_pipeline, print_pipeline_plan
from embedtrain.errors import ConfigError, EmbedtrainError
from embedtrain.pipeline.compose import compose_pipeline
from embedtrain.pipeline.disk import disk_of_training, require_disk_space
from embedtrain.pipeline.expand import expand
from embedtrain.pipeline.run import table_of
from embedtrain.pipeline.state import StageRecord, input_paths
from embedtrain.pipeline.types import Selection
from embedtrain.planning.model_costs import build_meta_encoder
from embedtrain.tracking.pages import Page
from tests.conftest import ROOT
from tests.pipeline.recipes import TRAINING, compose, small_pipeline


def changed(inputs, stage, **options):
    content = small_pipeline(inputs)
    content["stages"][stage] |= options
    return content


def cheap_pipeline(inputs, stage, options):
    """Mining with a model that is there, which composes faster than a training, and what follows."""
    content = small_pipeline(inputs, evaluation={})
    del content["stages"]["weak"]
    content["stages"]["mined"]["model"] = str(inputs / "model")
    content["stages"]["tuned"]["init"] = {"from": "mined"}
    content["stages"]["again"] = content["stages"]["mined"] | {"data": ["${out:mined.data}"]}
    content["stages"] = {name: content["stages"][name] for name in ("mined", "again", "tuned", "final")}
    content["stages"][stage] |= options
    return content


def test_a_wrong_pooling_of_a_training_is_no_code_that_a_file_names(run_inputs, tmp_path):
    content = small_pipeline(run_inputs, evaluation={})
    content["stages"]["weak"]["model"] = {"path": "m", "pooling": "clss"}
    with pytest.raises(ConfigError, match=r"stages.weak: .*model.pooling=clss.*expected one of"):
        compose(tmp_path, content)


def test_stages_refer_to_the_results_of_earlier_ones(run_inputs, tmp_path):
    pipeline = compose(tmp_path, small_pipeline(run_inputs), "stages.tuned.train.steps=9")
    stages = tmp_path / "run" / "stages"
    assert [stage.name for stage in pipeline.stages] == [
        "weak", "weak-evaluation", "mined", "tuned", "tuned-evaluation", "final",
    ]  # fmt: skip
    assert pipeline.stage("mined").options.model == str(stages / "weak" / "model")
    tuned = pipeline.stage("tuned")
    assert tuned.options.model.path == str(stages / "weak" / "model")
    assert tuned.options.data.train[0].path == str(stages / "mined" / "*.jsonl")
    assert tuned.options.train.steps == 9
    assert tuned.options.name == "small-tuned"
    assert sorted(tuned.depends) == ["mined", "weak"]
    assert pipeline.stage("final").options.output_dir == str(stages / "final" / "model")
    assert pipeline.stage("weak-evaluation").options.sets[0].path == str(run_inputs / "dev")
    quoted = compose_pipeline(["--config-dir", str(tmp_path), "recipe='small'", f"output_dir={tmp_path / 'run'}"])
    assert quoted is not None and quoted.stages[:3] == pipeline.stages[:3]
    assert [stage.name for stage in pipeline.dependents("mined")] == ["tuned", "tuned-evaluation", "final"]


def test_an_override_keeps_the_other_values_of_what_stages_share(run_inputs, tmp_path):
    content = small_pipeline(run_inputs, shared={"optim": {"lr": 1e-4, "warmup": 3, "schedule": "constant"}})
    content["stages"] = {name: content["stages"][name] | {"optim": "${shared.optim}"} for name in ("weak", "tuned")}
    content["stages"]["tuned"]["data"] = content["stages"]["weak"]["data"]
    pipeline = compose(tmp_path, content | {"evaluation": {}}, "stages.tuned.optim.lr=1e-5", "shared.optim.warmup=2")
    weak, tuned = (pipeline.stage(name).options.optim for name in ("weak", "tuned"))
    assert (weak.lr, weak.warmup, weak.schedule.value) == (1e-4, 2, "constant")
    assert (tuned.lr, tuned.warmup, tuned.schedule.value) == (1e-5, 2, "constant")


def test_the_recipe_of_one_training_is_no_pipeline():
    assert compose_pipeline(["recipe=quickstart"]) is None


def test_a_stage_starts_from_a_recipe(run_inputs, tmp_path):
    content = changed(run_inputs, "weak", recipe="quickstart", model={"vocab_size": 500})
    weak = compose(tmp_path, content).stage("weak").options
    assert weak.model.vocab_size == 500
    assert weak.model.config["num_hidden_layers"] == 2
    assert weak.loss.temperature == 0.07
    assert weak.train.steps == 6


@pytest.mark.parametrize(
    ("stage", "options", "message"),
    [
        ("tuned", {"init": {"of": 1}}, ("stages.tuned", "init: {from: NAME}")),
        ("again", {"init": {"from": "mined"}}, ("stages.again", "do: train")),
        ("again", {"negatvies": 3}, ("stages.again", "negatvies", "negatives")),
        ("again", {"index": {"dtpye": 3}}, ("stages.again", "index.dtpye")),
        ("tuned", {"init": {"from": "mined"}}, ("stages.tuned", "mined", "model")),
        ("tuned", {"init": {"from": "strong"}}, ("stages.tuned", "strong")),
        ("mined", {"data": ["${out:again.data}"]}, ("stages.mined", "again", "later")),
        ("again", {"data": ["${out:mined.dta}"]}, ("stages.again", "dta", "data, dir")),
        ("mined", {"do": "mien"}, ("stages.mined", "do=mien", "mine")),
        ("mined", {"output_dir": "elsewhere"}, ("stages.mined", "output_dir=elsewhere")),
        ("mined", {"data": ["missing.jsonl"]}, ("stages.mined", "missing.jsonl")),
        ("mined", {"negatives": 0}, ("stages.mined", "negatives=0")),
        ("mined", {"pooling": "clss"}, ("stages.mined", "pooling=clss", "expected one of cls, mean")),
        ("mined", {"kind": "densee"}, ("stages.mined", "kind=densee", "expected one of dense")),
        ("mined", {"repeat": 0}, ("stages.mined", "repeat=0")),
        ("mined", {"each": []}, ("stages.mined", "each=[]")),
    ],
)
def test_a_mistake_in_any_stage_is_reported_at_once(run_inputs, tmp_path, stage, options, message):
    with pytest.raises(EmbedtrainError) as error:
        compose(tmp_path, cheap_pipeline(run_inputs, stage, options))
    for part in message:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stages.again.negatives=0"], ("stages.again", "negatives=0")),
        (["stages.tuned.optim.lrr=0", "stages.tuned.init={}", "~stages.tuned.init"], ("stages.tuned", "optim.lrr")),
        (["optim.lr=1"], ("optim.lr=1", "stages.STAGE.optim.lr")),
        (["stages.agian.negatives=1"], ("agian", "again")),
        (["output_dirr=x"], ("output_dirr", "output_dir")),
        (["from=tunde"], ("from=tunde", "tuned")),
        (["only=mined", "until=tuned"], ("only=mined", "until=")),
        (["stages.again.negatives=1,2"], ("stages.again.negatives=1,2", "one value")),
    ],
)
def test_a_mistake_on_the_command_line(run_inputs, tmp_path, arguments, message):
    with pytest.raises(ConfigError) as error:
        compose(tmp_path, cheap_pipeline(run_inputs, "mined", {}), *arguments)
    for part in message:
        assert part in str(error.value)


def test_unknown_keys_of_the_recipe(run_inputs, tmp_path):
    with pytest.raises(ConfigError, match="stagse"):
        compose(tmp_path, small_pipeline(run_inputs, stagse={}))
    with pytest.raises(ConfigError, match="defaults"):
        compose(tmp_path, small_pipeline(run_inputs, defaults=[]))


def test_members_of_a_fan_out(run_inputs, tmp_path):
    members = {"low": {"optim": {"lr": 1e-4}}, "high": {"seed": 7}}
    content = changed(run_inputs, "tuned", each=members, init={"from": "weak", "optimizer": True})
    content["stages"]["final"]["run"] = "${out:tuned-low.run}"
    runs = {"low": "${out:tuned-low.run}", "high": "${out:tuned-high.run}"}
    content["stages"]["joint"] = {"do": "export", "adapters": runs}
    pipeline = compose(tmp_path, content, "from=tuned", "until=tuned")
    assert pipeline.selection == Selection(("tuned-low", "tuned-high"), "tuned-high")
    low, high = pipeline.stage("tuned-low"), pipeline.stage("tuned-high")
    assert (low.options.optim.lr, high.options.optim.lr) == (1e-4, 1e-3)
    assert (low.options.seed, high.options.seed) == (42, 7)
    assert [stage.name for stage in pipeline.stages if stage.command.name == "evaluate"] == [
        "weak-evaluation", "tuned-low-evaluation", "tuned-high-evaluation",
    ]  # fmt: skip
    assert low.options.train.init_from == str(tmp_path / "run/stages/weak")
    assert input_paths(low)["train.init_from"] == low.options.train.init_from
    joint = pipeline.stage("joint")
    assert input_paths(joint) == {f"adapters.{name}": str(tmp_path / f"run/stages/tuned-{name}") for name in runs}
    assert joint.depends == ("tuned-low", "tuned-high")
    content["stages"]["final"]["run"] = "${out:tuned.run}"
    with pytest.raises(ConfigError, match=r"tuned\.each"):
        compose(tmp_path, content)


def test_repeat_makes_members_with_other_seeds():
    expanded = expand({"tuned": {"do": "train", "repeat": 3, "seed": 5}}, {})
    assert expanded.groups == {"tuned": ["tuned-1", "tuned-2", "tuned-3"]}
    assert [stage["seed"] for stage in expanded.stages.values()] == [5, 6, 7]


def test_models_of_stages_are_merged(run_inputs, tmp_path):
    content = small_pipeline(run_inputs)
    content["stages"]["merged"] = {"do": "merge", "models": ["${out:weak.model}", "${out:tuned.model}"]}
    content["evaluation"]["after"].append("merged")
    names = [stage.name for stage in compose(tmp_path, content).stages]
    assert names[-2:] == ["merged", "merged-evaluation"]


def test_rounds_of_mining_and_training():
    mined = {"do": "mine", "model": "${out:rounds.model}", "data": "rows.jsonl"}
    tuned = {"do": "train", "init": {"from": "rounds"}, "data": {"train": ["${out:mined.data}", "${out:clean.data}"]}}
    loop = {"repeat": 2, "from": "weak", "stages": {"mined": mined, "tuned": tuned}}
    expanded = expand({"weak": {"do": "train"}, "rounds": loop}, {"after": ["rounds"], "sets": ["dev"]})
    assert list(expanded.stages) == [
        "weak", "rounds-1-mined", "rounds-1-tuned", "rounds-2-mined", "rounds-2-tuned", "rounds-2-tuned-evaluation",
    ]  # fmt: skip
    assert expanded.stages["rounds-1-mined"]["model"] == "${out:weak.model}"
    assert expanded.stages["rounds-2-mined"]["model"] == "${out:rounds-1-tuned.model}"
    second = expanded.stages["rounds-2-tuned"]
    assert second["init"] == {"from": "rounds-1-tuned"}
    assert second["data"]["train"] == ["${out:rounds-2-mined.data}", "${out:clean.data}"]
    assert expanded.aliases == {"rounds": "rounds-2-tuned"}


@pytest.mark.parametrize("name", ["x/../../../../important", "..", "/etc", "a/b", "a.b", "", "x\n", "x\0", "é" * 101])
def test_the_names_of_stages_are_those_of_folders(name):
    """Whichever way they are made: those of a loop have the number of the round before them."""
    training = {"do": "train"}
    for stages in (
        {name: training},
        {"l": {"repeat": 2, "stages": {name: training}}},
        {"l": {"repeat": 2, "stages": {name: {**training, "repeat": 2}}}},
        {"s": {**training, "each": {name: {}}}},
        {"l": {"repeat": 1, "stages": {"s": {**training, "each": {name: {}}}}}},
    ):
        with pytest.raises(ConfigError, match="letters, digits, _ and -"):
            expand(stages, {})


PIPELINES = sorted(path.stem for path in (ROOT / "recipes" / "pipelines").glob("*.yaml"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in PIPELINES])
def test_pipelines_of_the_project_compose(name):
    path = ROOT / "recipes" / "pipelines" / f"{name}.yaml"
    assert f"recipe=pipelines/{name}" in path.read_text().splitlines()[0]
    pipeline = compose_pipeline([f"recipe=pipelines/{name}"], check_paths=False)
    assert pipeline is not None
    assert {stage.command.name for stage in pipeline.stages} >= {"train", "evaluate"}


def test_the_plan_of_the_quickstart_has_all_stages_and_the_layers_that_prune_keeps():
    pipeline = compose_pipeline(["recipe=pipelines/quickstart"])
    assert pipeline is not None
    stages = {stage.stage.name: stage for stage in plan_pipeline(pipeline, PlanOptions(gpus=2))}
    kinds = [stage.stage.command.name for stage in stages.values() if stage.stage.command.name != "evaluate"]
    assert list(dict.fromkeys(kinds)) == [
        "train", "filter", "mine", "vectors", "merge", "prune", "calibrate", "export",
    ]  # fmt: skip
    whole, half = (stages[name].training for name in ("tuned-1", "student"))
    assert whole is not None and half is not None
    assert half.model.weights.parameters < whole.model.weights.parameters


def test_forms_of_vectors_have_rows_of_their_own(run_inputs, tmp_path):
    content = small_pipeline(run_inputs, evaluation={})
    content["stages"] = {"mined": content["stages"]["mined"] | {"model": str(run_inputs / "model")}}
    pipeline = compose(tmp_path, content)
    metrics = {"dev": {"ndcg@10": 0.5, "mrr@10": 0.4}, "dev@int8": {"ndcg@10": 0.25}, "test": {"ndcg@10": 1.0}}
    record = StageRecord("evaluate", "", {}, {}, began=0.0, ranks=1, ended=2.0, figures={"metrics": metrics})
    header, rows = table_of([(pipeline.stage("mined"), record)])
    assert header == ["stage", "do", "took", "dev ndcg@10", "test ndcg@10"]
    assert rows == [["mined", "mine", "2.0 s", "0.5000", "1.0000"], ["mined: int8", "", "", "0.2500", ""]]


def test_figures_of_a_subset_have_columns_of_their_own(run_inputs, tmp_path):
    content = small_pipeline(run_inputs)
    sets = [str(run_inputs / "dev"), {"path": str(run_inputs / "dev"), "name": "part", "subset": 5}]
    for name, subset in (("all", {}), ("few", {"subset": 8})):
        options = {"do": "evaluate", "model": str(run_inputs / "model"), "pooling": "mean", "sets": sets}
        content["stages"][name] = options | subset
    pipeline = compose(tmp_path, content)
    figures = {"metrics": {"dev": {"ndcg@10": 0.5}, "part": {"ndcg@10": 0.75}}}
    record = StageRecord("evaluate", "", {}, {}, began=0.0, ranks=1, ended=2.0, figures=figures)
    header, rows = table_of([(pipeline.stage(name), record) for name in ("all", "few")])
    assert header[3:] == ["dev ndcg@10", "part ndcg@10 of 5", "dev ndcg@10 of 8"]
    assert [row[3:] for row in rows] == [["0.5000", "0.7500", ""], ["", "0.7500", "0.5000"]]


RERANKER = {"model": {"kind": "cross_encoder"}, "loss": {"name": "bce"}}


def with_reranker(inputs, **changes):
    content = small_pipeline(inputs, **changes)
    path = {"path": str(inputs / "model")}
    mined = {"train": ["${out:mined.data}"]}
    content["stages"]["orders"] = TRAINING | RERANKER | {"model": RERANKER["model"] | path, "data": mined}
    return content


def test_a_reranker_is_measured_by_how_it_orders_documents(run_inputs, tmp_path):
    sets = [str(run_inputs / "dev")]
    content = with_reranker(run_inputs, evaluation={"after": ["tuned", "orders"], "sets": sets, "metrics": ["ndcg@10"]})
    pipeline = compose(tmp_path, content)
    options = pipeline.stage("orders-evaluation").options
    assert options.model == ""
    assert options.reranker.path == pipeline.stage("orders").output("model")
    assert pipeline.stage("tuned-evaluation").options.reranker is None
    content["evaluation"]["reranker"] = {"path": str(run_inputs / "model")}
    with pytest.raises(ConfigError, match=r"stages.orders-evaluation: .* evaluation.reranker"):
        compose(tmp_path, content)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            {"do": "evaluate", "model": "${out:orders.model}"},
            r"writes a model .* cross_encoder.*reranker: \$\{out:orders",
        ),
        (
            {"do": "evaluate", "model": "${out:weak.model}", "reranker": "${out:tuned.model}"},
            r"reranker.path=.*dense.*",
        ),
        (
            {"do": "mine", "model": "${out:shorter.model}"},
            r"stage shorter writes .* cross_encoder, and mine takes dense",
        ),
        ({"do": "vectors", "model": "${out:orders.model}"}, "vectors takes dense or dual_encoder or image_text$"),
        ({"do": "static", "model": "${out:orders.model}"}, "static takes dense$"),
    ],
)
def test_a_stage_takes_models_of_its_kinds(run_inputs, tmp_path, stage, message):
    """Found before the first stage runs; what prunes a reranker writes a reranker."""
    content = with_reranker(run_inputs, evaluation={})
    content["stages"]["shorter"] = {"do": "prune", "model": "${out:orders.model}", "keep": 1}
    more = {"sets": [str(run_inputs / "dev")]} if stage["do"] == "evaluate" else {}
    more |= {"data": [str(run_inputs / "train.jsonl")]} if stage["do"] in ("mine", "vectors") else {}
    content["stages"]["last"] = stage | more
    with pytest.raises(ConfigError, match=message) as error:
        compose(tmp_path, content)
    assert str(error.value).startswith("stages.last: ")


def test_a_training_names_the_kind_of_the_model_that_it_starts_from(run_inputs, tmp_path):
    content, path = small_pipeline(run_inputs, evaluation={}), str(run_inputs / "model")
    rows = {"data": {"train": [str(run_inputs / "train.jsonl")]}}
    content["stages"]["pictures"] = TRAINING | rows | {"model": {"kind": "image_text", "path": path}}
    content["stages"]["last"] = TRAINING | rows | {"model": {"pooling": "mean"}, "init": {"from": "pictures"}}
    message = r"^stages\.last: model\.kind=dense: .* is what stage pictures writes; write model\.kind=image_text"
    with pytest.raises(ConfigError, match=message):
        compose(tmp_path, content)


def test_an_unknown_pipeline_is_named_with_those_that_exist():
    with pytest.raises(ConfigError, match=r"pipelines/quickstrat.*pipelines/quickstart"):
        compose_pipeline(["recipe=pipelines/quickstrat"])


def test_the_plan_of_a_pipeline_needs_no_files(run_inputs, tmp_path, capsys):
    content = small_pipeline(run_inputs)
    content["stages"]["weak"]["data"]["train"] = ["missing.jsonl"]
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "small.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    arguments = ["--config-dir", str(tmp_path), "recipe=small", f"output_dir={tmp_path / 'run'}", "gpus=2"]
    planned = compose_pipeline_plan(arguments)
    assert planned is not None
    stages = {stage.stage.name: stage for stage in plan_pipeline(*planned)}
    assert [stage.status for stage in stages.values()] == ["to run"] * 6
    weak, tuned = stages["weak"].training, stages["tuned"].training
    assert weak is not None and tuned is not None
    assert weak.cluster.ranks == 2
    assert tuned.model.weights.parameters == weak.model.weights.parameters
    assert (weak.work.texts_per_row, tuned.work.texts_per_row) == (2, 4), "two negatives are mined for each row"
    assert tuned.best.memory.parameters == weak.best.memory.parameters
    assert stages["tuned"].disk == stages["weak"].disk
    assert stages["mined"].training is None
    print_pipeline_plan(Page(), planned[0], list(stages.values()))
    output = capsys.readouterr().out
    assert re.search(r"tuned +[\d,]+ +fsdp", output), output


def test_a_full_disk_is_reported_before_the_first_stage(run_inputs, tmp_path, monkeypatch):
    content = small_pipeline(run_inputs)
    content["stages"]["pruned"] = {"do": "prune", "model": "${out:tuned.model}", "keep": 1}
    content["stages"]["student"] = content["stages"]["tuned"] | {"init": {"from": "pruned"}}
    pipeline = compose(tmp_path, content)
    root = tmp_path / "run"
    root.mkdir()
    free = [0]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0] if path == root else 10**18))
    with pytest.raises(ConfigError) as error:
        require_disk_space(pipeline, pipeline.stages)
    match = re.search(r"output_dir=(\S+): .* need ([\d,]+) bytes .* and 0 bytes", str(error.value))
    assert match is not None and match[1] == str(root)
    needed = int(match[2].replace(",", ""))
    recipe = pipeline.stage("weak").options
    meta = build_meta_encoder(recipe)
    exported = 4 * sum(weight.numel() for weight in meta.encoder.parameters())
    assert needed == 2 * disk_of_training(recipe, meta) + exported  # not of the student
    free[0] = needed
    require_disk_space(pipeline, pipeline.stages)
    (root / "stages" / "weak").mkdir(parents=True)
    (root / "stages" / "weak" / "written").write_bytes(bytes(1000))
    free[0] = needed - 1000
    require_disk_space(pipeline, pipeline.stages)
