"""The emulator's policies, for kernels that there are twice: of bfloat16 and of float16.

At intensity 1 each has one of the two policies that together find the most: their code is the same.
"""

from __future__ import annotations

import pytest
import torch

from thunderkittens.emulation import POLICIES

DTYPES = (torch.bfloat16, torch.float16)


def least_intensity(dtype: torch.dtype, policy: str) -> pytest.MarkDecorator:
    """The mark of a test of a kernel of this dtype under this policy."""
    own = POLICIES[(DTYPES.index(dtype) + 1) % 2]
    return pytest.mark.intensity(1 if policy == own else 2)


every_dtype_and_policy = pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        pytest.param(dtype, policy, id=f"{dtype}-{policy}", marks=least_intensity(dtype, policy))
        for dtype in DTYPES
        for policy in POLICIES
    ],
)
