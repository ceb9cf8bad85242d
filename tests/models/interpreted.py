"""liger-kernel's own kernels in Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.models.interpreted`.

The interpreter has no numbers as arguments, none of CUDA's own functions, and no arithmetic in bf16: what differs in
precision between the families of models is compared in fp16.
"""

import json
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from liger_kernel.ops import geglu, rms_norm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from triton.runtime import interpreter

from embedtrain.distributed.world import World, init_process_group
from embedtrain.models.fused_kernels import kernel_error, liger_kernels
from tests.models.test_fused_kernels import CPU, FAMILIES, WAYS, compared, small_blocks
from tests.small import small_model

convert = interpreter._implicit_cvt


def converted(value):
    if not isinstance(value, float):
        return convert(value)
    return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)


@triton.jit
def rsqrt(values):
    return tl.rsqrt(values)


@triton.jit
def tanh(values):
    return 2 * tl.sigmoid(2 * values) - 1


def check_casting():
    """A norm of Llama multiplies in the compute type, one of Gemma in fp32, and adds 1 to the weight."""
    torch.manual_seed(0)
    for module, added, casting in ((LlamaRMSNorm, 0.0, "llama"), (GemmaRMSNorm, 1.0, "gemma")):
        norm = module(24, eps=1e-3).half()
        torch.nn.init.normal_(norm.weight)
        hidden = torch.randn(40, 24, dtype=torch.float16)
        found = {
            name: (liger_kernels().norm(hidden, norm.weight, 1e-3, added, name, False) != norm(hidden)).float().mean()
            for name in ("llama", "gemma")
        }
        assert found[casting] < 0.01 < 0.05 < max(found.values()), (module, found)


def main():
    interpreter._implicit_cvt, rms_norm.rsqrt, geglu.tanh = converted, rsqrt, tanh
    check_casting()
    with tempfile.TemporaryDirectory() as folder:
        init_process_group(dist.FileStore(f"{folder}/store", 1), 0, 1, CPU, "gloo", timeout=60.0)
        world = World(0, 1, 0, 1, CPU)
        for family in FAMILIES:
            assert kernel_error(small_blocks(family), torch.float32, CPU) is None
            compared(world, small_model(family), {})
        compared(world, small_model("llama"), WAYS["padded, recomputed between products"][1])
        dist.destroy_process_group()
    print(json.dumps({"families": FAMILIES}))


if __name__ == "__main__":
    main()
