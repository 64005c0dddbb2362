"""Shared by the tests of the package. LIBATTN_CASES=all runs every combination of the accuracy tests, a number so many."""

import pathlib

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def root():
    return ROOT
