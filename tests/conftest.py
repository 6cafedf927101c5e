"""What several test files stand on: one thread, and the tokenizer of the embedded checkpoint."""
from pathlib import Path

import pytest
import torch

from support.chat import load_tokenizer

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def chat():
    return load_tokenizer(Path(__file__).resolve().parent.parent / "data/arithmetic/base")
