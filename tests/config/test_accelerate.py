"""Files of accelerate: every key of accelerate's is translated, reported as without effect, or rejected."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig

from embedtrain.config.accelerate import describe_accelerate_config, translate_accelerate_config
from embedtrain.config.compose import compose_recipes, load_recipe, to_plain
from embedtrain.config.recipe import CheckpointLayout, Precision, Strategy
from embedtrain.errors import ConfigError

# What `accelerate config` (1.15) writes for FSDP2, and for FSDP1.
FSDP2 = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "FSDP",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "fsdp_config": {
        "fsdp_activation_checkpointing": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "XLMRobertaLayer, XLMRobertaEmbeddings",
        "fsdp_version": 2,
    },
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
FSDP1 = FSDP2 | {
    "mixed_precision": "no",
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False,
        "fsdp_offload_params": True,
        "fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_sync_module_states": True,
        "fsdp_use_orig_params": True,
        "fsdp_version": 1,
        "fsdp_min_num_params": 100000000,
        "fsdp_cpu_ram_efficient_loading": True,
    },
}
OWN = ["name=t", "model.path=m", "data.train=[a.jsonl]", "train.steps=1"]


@pytest.fixture
def write(tmp_path):
    def write_file(values) -> Path:
        path = tmp_path / "accelerate.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write_file


def recipe_with(path, *arguments):
    (recipe,) = compose_recipes([*OWN, f"parallel.accelerate_config={path}", *arguments])
    return recipe


def fsdp2_with(**changes):
    return FSDP2 | {"fsdp_config": FSDP2["fsdp_config"] | changes}


def test_a_file_of_fsdp2(write):
    parallel = recipe_with(write(FSDP2)).parallel
    assert parallel.strategy is Strategy.fsdp
    assert (parallel.reshard_after_forward, parallel.activation_checkpointing, parallel.cpu_offload) == (
        True,
        True,
        False,
    )
    assert parallel.block_class == "XLMRobertaLayer,XLMRobertaEmbeddings"
    assert parallel.precision is Precision.bf16


def test_a_file_of_fsdp1(write):
    recipe = recipe_with(write(FSDP1))
    parallel = recipe.parallel
    assert (parallel.strategy, parallel.reshard_after_forward, parallel.cpu_offload) == (Strategy.hsdp, False, True)
    assert parallel.precision is Precision.fp32
    assert recipe.checkpoint.layout is CheckpointLayout.full


@pytest.mark.parametrize(
    ("value", "strategy", "reshard_after_forward"),
    [
        ("FULL_SHARD", "fsdp", True),
        ("SHARD_GRAD_OP", "fsdp", False),
        ("NO_SHARD", "ddp", None),
        ("HYBRID_SHARD", "hsdp", True),
        ("HYBRID_SHARD_ZERO2", "hsdp", False),
        (1, "fsdp", True),
        (4, "hsdp", True),
    ],
)
@pytest.mark.parametrize("key", ["fsdp_sharding_strategy", "fsdp_reshard_after_forward"])
def test_sharding_strategies(write, key, value, strategy, reshard_after_forward):
    if key == "fsdp_reshard_after_forward" and isinstance(value, int):
        pytest.skip("only the older key takes numbers")
    values = FSDP1 | {"fsdp_config": {key: value}}
    parallel = recipe_with(write(values)).parallel
    assert (parallel.strategy.value, parallel.reshard_after_forward) == (strategy, reshard_after_forward)


def test_every_key_is_described(write):
    for values in (FSDP1, FSDP2):
        recipe = recipe_with(write(values))
        description = "\n".join(describe_accelerate_config(recipe))
        keys = [key for key in values if key not in ("fsdp_config", "tpu_env", "tpu_use_cluster", "tpu_use_sudo")]
        for key in [*keys, *values["fsdp_config"]]:
            if key == "distributed_type" and values is FSDP1:
                continue  # the sharding strategy decides
            assert f"{key}=" in description, key
    assert "fsdp_sharding_strategy=HYBRID_SHARD_ZERO2 -> parallel.strategy=hsdp" in "\n".join(
        describe_accelerate_config(recipe_with(write(FSDP1)))
    )


def test_every_key_of_accelerate_is_known(write):
    """The fields of its dataclass, with their defaults."""
    defaults = ClusterConfig(
        compute_environment="LOCAL_MACHINE", distributed_type="FSDP", mixed_precision="bf16", use_cpu=False, debug=False
    )
    values = {field.name: getattr(defaults, field.name) for field in fields(ClusterConfig)}
    values |= {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP"}
    translate_accelerate_config(str(write(values)))


def test_options_of_the_recipe_win(write):
    recipe = recipe_with(write(FSDP2), "parallel.strategy=ddp", "parallel.precision=fp32")
    assert recipe.parallel.strategy is Strategy.ddp
    assert recipe.parallel.precision is Precision.fp32
    assert recipe.parallel.activation_checkpointing is True
    description = "\n".join(describe_accelerate_config(recipe))
    assert "distributed_type=FSDP -> overridden by the recipe's parallel.strategy=ddp" in description
    assert "mixed_precision=bf16 -> overridden by the recipe's parallel.precision=fp32" in description
    sized = FSDP2 | {"parallelism_config": {"parallelism_config_dp_replicate_size": 2, "dp_shard_size": 4}}
    assert recipe_with(write(sized)).parallel.shard_size == 4
    assert recipe_with(write(sized), "parallel.strategy=fsdp").parallel.shard_size is None


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        (FSDP2 | {"distributed_type": "DEEPSPEED"}, "distributed_type=DEEPSPEED is not supported: .*strategy=fsdp"),
        (FSDP2 | {"distributed_type": "MEGATRON_LM"}, "distributed_type=MEGATRON_LM is not supported"),
        (FSDP2 | {"distributed_type": "XLA"}, "distributed_type=XLA is not supported"),
        (FSDP2 | {"deepspeed_config": {"zero_stage": 3}}, "deepspeed_config=.*parallel\\.strategy=fsdp"),
        (FSDP2 | {"mixed_precision": "fp16"}, "mixed_precision=fp16 is not supported: .*write bf16, or no"),
        (FSDP2 | {"mixed_precision": "fp8"}, "mixed_precision=fp8 is not supported"),
        (FSDP2 | {"compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment=AMAZON_SAGEMAKER is not supported"),
        (FSDP2 | {"tpu_use_cluster": True}, "tpu_use_cluster=true is not supported"),
        (FSDP2 | {"dynamo_config": {"dynamo_backend": "AOT_EAGER"}}, "dynamo_backend=AOT_EAGER is not supported"),
        (FSDP2 | {"parallelism_config": {"parallelism_config_tp_size": 2}}, "tp_size=2 is not supported: .*write 1"),
        (FSDP2 | {"parallelism_config": {"parallelism_config_cp_size": 2}}, "cp_size=2 is not supported"),
        (FSDP2 | {"mixed_precison": "no"}, "mixed_precison .* did you mean mixed_precision"),
        (
            fsdp2_with(fsdp_auto_wrap_policy="SIZE_BASED_WRAP"),
            "SIZE_BASED_WRAP .*TRANSFORMER_BASED_WRAP",
        ),
        (fsdp2_with(fsdp_auto_wrap_policy="NO_WRAP"), "fsdp_auto_wrap_policy=NO_WRAP is not supported"),
        (
            fsdp2_with(fsdp_activation_checkpointing_offload=True),
            "_checkpointing_offload=true is not supported",
        ),
        (fsdp2_with(fsdp_offload_params="maybe"), "fsdp_offload_params=maybe is not supported: .*true or false"),
        (fsdp2_with(fsdp_sharding_strategy="ALL"), "fsdp_sharding_strategy=ALL is not supported: .*FULL_SHARD"),
        (fsdp2_with(fsdp_state_dict_type="BIG"), "fsdp_state_dict_type=BIG is not supported"),
        ([1], "the file holds .* not a mapping"),
        ({"fsdp_config": "x"}, "fsdp_config holds x, which is not a mapping"),
    ],
)
def test_a_rejected_key_is_named_with_its_value(write, values, pattern):
    path = write(values)
    with pytest.raises(ConfigError, match=pattern) as error:
        recipe_with(path)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"parallel.accelerate_config={path}")


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="`accelerate config`"):
        translate_accelerate_config(str(tmp_path / "none.yaml"))
    for text in ("a: [", "a: !!python/object/apply:os.system ['true']"):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            translate_accelerate_config(str(tmp_path / "bad.yaml"))


def test_fsdp_options_without_fsdp_are_ignored(write):
    """The launcher of accelerate ignores them too."""
    recipe = recipe_with(write(FSDP2 | {"distributed_type": "MULTI_GPU"}))
    assert recipe.parallel.strategy is Strategy.ddp
    assert recipe.parallel.activation_checkpointing is None
    assert "distributed_type is MULTI_GPU: fsdp_activation_checkpointing=true" in "\n".join(
        describe_accelerate_config(recipe)
    )


def test_dynamo_and_old_files(write):
    dynamo = {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": True}
    assert recipe_with(write(FSDP2 | {"dynamo_config": dynamo})).parallel.compile is True
    old = {key: value for key, value in FSDP2.items() if key != "mixed_precision"} | {"fp16": False}
    assert recipe_with(write(old | {"dynamo_backend": "NO"})).parallel.precision is Precision.fp32


def test_a_resolved_recipe_needs_the_file_no_more(write, tmp_path):
    path = write(FSDP2)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(to_plain(recipe_with(path))))
    path.unlink()
    assert load_recipe(tmp_path / "recipe.yaml").parallel.activation_checkpointing is True
