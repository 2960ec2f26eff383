"""A base in 4 or 8 bits computes the same in train and in eval mode, and passes gradients on, on every device.

On the CPU bitsandbytes has kernels for inference alone, and takes them in eval mode: 8-bit layers then give other
numbers than in train mode; 4-bit layers (where the CPU knows AVX512-BF16) are repacked for good at their first such
forward, and from then on no gradient passes them, without a word. Knows bitsandbytes' layers by their package.

Source: bitsandbytes 0.50, `nn.Linear4bit.forward` and `matmul_4bit`; `autograd._functions.matmul` for 8 bits.
"""

from __future__ import annotations

from torch import nn


def keep_train_kernels(model: nn.Module) -> None:
    """Set the quantised layers alone to train mode, where they have one arithmetic; they hold no dropout.

    Call it before the first forward, and after every `eval()`.

    Raises:
        ValueError: the weights are repacked already; bitsandbytes does not bring them back as they were.
    """
    for module in model.modules():
        if not type(module).__module__.startswith("bitsandbytes"):
            continue
        module.training = True
        quant_state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(quant_state, "packing_format_for_cpu", False):
            raise ValueError(
                "a forward in eval mode on the CPU has repacked the 4-bit weights for inference, and no gradient"
                " passes them any more; load the model anew and hand it over before its first forward, or by its name"
            )
