"""What of a request becomes a model's prompt."""

from __future__ import annotations

from pathlib import Path

from tests.engines.checkpoints import save_tokenizer
from workers.engines.prompt import Prompts


def test_a_conversation_goes_before_the_bare_prompt_beside_it(tmp_path: Path) -> None:
    """A chat for a picture carries both: the words for stages that draw, the conversation for the others."""
    tokenizer = save_tokenizer(tmp_path, [])
    prompts = Prompts(tokenizer)
    messages = [{"role": "user", "content": "a boat"}]
    told = tokenizer.decode(prompts.encode({"messages": messages, "prompt": "a boat"}, {}))
    assert told == "<|im_start|>user\na boat<|im_end|>\n<|im_start|>assistant"
    assert tokenizer.decode(prompts.encode({"prompt": "a boat"}, {})) == "a boat"
