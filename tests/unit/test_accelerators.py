"""The table of accelerators, and how one is found in it."""

import pytest

from phalanx.core.errors import LayoutError
from phalanx.plan.accelerators import find_accelerator, list_accelerators


def test_every_accelerator_has_what_a_plan_reads():
    for name, accelerator in list_accelerators().items():
        assert accelerator.peak_flops("bf16") > 1e13, name
        assert accelerator.memory_gib >= 16, name
        assert 2 <= accelerator.peak_flops("bf16") / accelerator.peak_flops("fp32") <= 35, name
        assert accelerator.fp32_source, name
        assert accelerator.memory_gb_s > accelerator.link_gb_s > 0, name
        assert accelerator.nic_gb_s <= accelerator.link_gb_s, name
        assert accelerator.link_domain >= accelerator.gpus_per_node, name


def test_narrower_types_are_no_slower_and_fall_back_on_wider_ones():
    a100, b200 = find_accelerator("a100-sxm"), find_accelerator("B200-SXM")
    assert a100.peak_flops("fp8") == a100.peak_flops("bf16") == 312e12
    assert a100.peak_flops("fp32") == 19.5e12
    assert b200.peak_flops("bf16") < b200.peak_flops("fp8") < b200.peak_flops("fp4")


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(LayoutError, match="h100-smx") as caught:
        find_accelerator("h100-smx")
    assert '"h100-sxm"' in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a100", '"a100-sxm-40" (40 GB), "a100-sxm" (80 GB), "a100-pcie" (80 GB)'),
        ("A100-80GB", '"a100-sxm" (80 GB)'),
        ("a100-80", '"a100-sxm" (80 GB)'),
        ("b200", 'did you mean "b200-sxm"?'),
    ],
)
def test_a_family_alone_is_answered_with_its_members_and_their_memory(name: str, said: str):
    """ "a100" was answered with "a10g", and an A100 of 80 GB with that of 40."""
    with pytest.raises(LayoutError) as caught:
        find_accelerator(name)
    assert said in str(caught.value)
