"""The default model, SmolLM2-135M-Instruct, in the running app against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedModel

from actors.engine.config import EngineConfig
from actors.engine.engine import Engine
from actors.engine.loading import load_model
from actors.engine.request import SamplingParams
from actors.model_source import ensure_default_model
from tests.engine_driver import greedy, run_prompts
from tests.flow_client import FlowAnswer, FlowClient
from tests.openai_app import ARGS
from tests.reference import assert_greedy, load_reference
from tests.running_app import Deploy

pytestmark = [pytest.mark.cluster, pytest.mark.model]

PROMPTS = (Path(__file__).parents[1] / "fixtures" / "prompts.txt").read_text().splitlines()
BLOCK = 16
MODES = ("monolithic", "static")  # the running app of the other files last
TOKENS = 24
SAMPLING = [
    SamplingParams(max_tokens=TOKENS, temperature=0.8, top_p=0.9, seed=seed, ignore_eos=True) for seed in range(4)
]


@pytest.fixture(scope="module")
def model_folder() -> Path:
    return ensure_default_model()


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> PreTrainedModel:
    return load_reference(model_folder)


@pytest.fixture(scope="module")
def prompts(model_folder: Path) -> list[list[int]]:
    """Real questions in the chat template, as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in PROMPTS
    ]


@pytest.fixture(scope="module", params=MODES)
def client(request: pytest.FixtureRequest, deploy: Deploy) -> FlowClient:
    app = deploy(ARGS | {"mode": request.param})
    return FlowClient(tuple(app.members()), request.param)


class Checked:
    """Asks the reference once about what several runs answer alike."""

    def __init__(self, reference: PreTrainedModel) -> None:
        self._reference = reference
        self._greedy: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()

    def check(self, prompts: Sequence[Sequence[int]], answers: Sequence[FlowAnswer]) -> None:
        """Every answer is whole, and the reference's."""
        pairs = {(tuple(prompt), tuple(answer.tokens)) for prompt, answer in zip(prompts, answers, strict=True)}
        assert {len(answer.tokens) for answer in answers} == {TOKENS}
        new = list(pairs - self._greedy)
        assert_greedy(self._reference, [prompt for prompt, _ in new], [output for _, output in new])
        self._greedy |= pairs


@pytest.fixture(scope="module")
def checked(reference: PreTrainedModel) -> Checked:
    return Checked(reference)


def full_blocks(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The cached tokens of prompts that have been computed before."""
    return [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]


def test_real_prompts_cold_and_with_a_prefix_hit(
    client: FlowClient, prompts: list[list[int]], checked: Checked
) -> None:
    assert len(prompts) >= 20
    checked.check(prompts, client.run(prompts, greedy(TOKENS), together=True))
    warm = client.run(prompts, greedy(TOKENS), together=True)
    checked.check(prompts, warm)
    assert [answer.cached_tokens for answer in warm] == full_blocks(prompts)
    some = prompts[::3]
    alone = client.run(some, greedy(TOKENS), together=False)
    checked.check(some, alone)
    assert [answer.cached_tokens for answer in alone] == full_blocks(some)


def test_prompts_that_end_at_block_borders(client: FlowClient, prompts: list[list[int]], checked: Checked) -> None:
    text = [token for prompt in prompts for token in prompt][100:]
    borders = [text[start : start + n] for start, n in enumerate((BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK))]
    checked.check(borders, client.run(borders, greedy(TOKENS), together=False))


def test_generate_itself_gives_the_same_answer(
    client: FlowClient, prompts: list[list[int]], reference: PreTrainedModel
) -> None:
    import torch

    expected = reference.generate(torch.tensor([prompts[0]]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    answer = client.run(prompts[:1], greedy(12), together=False)[0]
    assert answer.tokens == expected[0, len(prompts[0]) :].tolist()


@pytest.fixture(scope="module")
def sampled_alone(model_folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What an engine in this process gives, one request after the other."""
    config = EngineConfig(device="cpu", dtype="float32", block_tokens=BLOCK, kv_cache_blocks=64)
    engine = Engine(load_model(model_folder, config), config)
    return [run_prompts(engine, [prompt], params)[0] for prompt, params in zip(prompts[4:8], SAMPLING, strict=True)]


@pytest.mark.parametrize("together", [False, True])
def test_seeded_sampling_does_not_depend_on_mode_or_batch(
    together: bool, client: FlowClient, prompts: list[list[int]], sampled_alone: list[list[int]]
) -> None:
    answers = client.run(prompts[4:8], SAMPLING, together=together)
    assert [answer.tokens for answer in answers] == sampled_alone
