"""Similarity of images against worked numbers and their laws."""

from __future__ import annotations

import pytest
import torch

from fleetdistill_lab.audit.pictures import psnr, reidentified, ssim


@pytest.mark.parametrize("side", [8, 28])
def test_an_image_is_like_itself_and_unlike_its_negative(side):
    images = torch.rand(3, 1, side, side, generator=torch.Generator().manual_seed(0))
    assert ssim(images, images).tolist() == pytest.approx([1, 1, 1])
    assert (ssim(images, 1 - images) < 0).all()


def test_ssim_of_constant_images():
    """Variances are 0: (2 * 0.2 * 0.6 + 1e-4) / (0.04 + 0.36 + 1e-4) = 0.60015."""
    first, second = torch.full((1, 1, 8, 8), 0.2), torch.full((1, 1, 8, 8), 0.6)
    assert ssim(first, second).item() == pytest.approx(0.2401 / 0.4001, abs=1e-6)


def test_psnr_of_an_error_of_a_tenth_is_20_db():
    zero = torch.zeros(2, 1, 8, 8)
    assert psnr(zero, zero + 0.1).tolist() == pytest.approx([20, 20], abs=1e-4)


def test_a_picture_is_reidentified_if_no_other_image_is_nearer():
    originals = torch.zeros(2, 1, 2, 2)
    pictures = torch.stack([torch.full((1, 2, 2), 0.1), torch.full((1, 2, 2), 0.9)])
    assert reidentified(pictures, originals, torch.ones(5, 1, 2, 2)) == 0.5
